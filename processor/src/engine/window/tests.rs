use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::engine::Clock;
use crate::engine::clock::Bounds;

#[derive(Clone, Debug, Default, PartialEq)]
struct Sum {
    count: i64,
    total: i64,
}

impl Pane for Sum {
    fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.total += other.total;
    }
}

const DISORDER: i64 = 5;
const LATENESS: i64 = 30;
const BOUNDS: Bounds = Bounds { disorder: DISORDER, future: i64::MAX, horizon: i64::MAX };

/// Runs records through the engine's clock and panes; gives the final value of every window.
fn run(arrivals: &[(i64, i64)], length: i64, per_window: i64) -> (BTreeMap<i64, Sum>, u64) {
    let (mut clock, mut panes) = (Clock::new(), Panes::<Sum>::new(length, per_window));
    let (mut windows, mut settled) = (BTreeMap::new(), None);
    let mut settle = |panes: &mut Panes<Sum>, floor: i64| {
        let after = settled.unwrap_or_else(|| panes.iter().next().map_or(floor, |(start, _)| start));
        for end in panes.ends(after, floor) {
            if let Some(window) = panes.window(end) {
                windows.insert(end, window);
            }
        }
        settled = Some(floor.max(after));
        panes.settle(floor);
    };
    for (at, value) in arrivals {
        if let Some(pane) = panes.at(*at) {
            pane.merge(&Sum { count: 1, total: *value });
        }
        clock.data(*at, None, BOUNDS);
        if let Some(watermark) = clock.watermark(BOUNDS) {
            // Nothing settles before the disorder of the first records is over.
            if watermark - LATENESS > 0 {
                settle(&mut panes, watermark - LATENESS);
            }
        }
    }
    settle(&mut panes, 1_000_000);
    (windows, panes.too_late)
}

fn brute_force(records: &[(i64, i64)], length: i64, per_window: i64) -> BTreeMap<i64, Sum> {
    let mut windows = BTreeMap::new();
    for (at, value) in records {
        let first_end = at.div_euclid(length) * length + length;
        for k in 0..per_window {
            let window: &mut Sum = windows.entry(first_end + k * length).or_default();
            window.merge(&Sum { count: 1, total: *value });
        }
    }
    windows
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn windows_equal_a_brute_force_calculation_under_shuffles_within_the_lateness(
        steps in prop::collection::vec((0i64..4, -100i64..100, 0i64..(DISORDER + LATENESS)), 1..300),
        length in 1i64..20,
        per_window in 1i64..5,
    ) {
        let mut at = 0;
        let records: Vec<(i64, i64)> = steps.iter().map(|(step, value, _)| { at += step; (at, *value) }).collect();
        // Each record is delayed by less than bound and allowance together.
        let mut delayed: Vec<_> = records.iter().zip(&steps).map(|(record, (_, _, delay))| (record.0 + delay, *record)).collect();
        delayed.sort_by_key(|(arrival, _)| *arrival);
        let arrivals: Vec<_> = delayed.into_iter().map(|(_, record)| record).collect();
        let (windows, too_late) = run(&arrivals, length, per_window);
        prop_assert_eq!(too_late, 0);
        prop_assert_eq!(windows, brute_force(&records, length, per_window));
    }
}

#[test]
fn late_record_within_allowance_revises_its_window_and_a_later_one_is_counted() {
    let mut panes = Panes::<Sum>::new(10, 2);
    panes.at(12).expect("in time").total += 1;
    panes.settle(19);
    assert_eq!(panes.window(20).map(|window| window.total), Some(1));
    panes.at(11).expect("within the allowance").total += 1;
    assert_eq!(panes.window(20).map(|window| window.total), Some(2));
    panes.settle(30);
    assert!(panes.at(11).is_none());
    assert_eq!(panes.too_late, 1);
}

#[test]
fn panes_that_no_window_needs_are_forgotten() {
    let mut panes = Panes::<Sum>::new(10, 4);
    for at in 0..10_000 {
        panes.at(at).expect("in time").count += 1;
        panes.settle(at - 30);
    }
    assert!(panes.iter().count() <= 12, "{}", panes.iter().count());
}
