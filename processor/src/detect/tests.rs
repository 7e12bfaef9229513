//! Each detector on small logs: what it opens, what it stays silent about, and that only the log decides.

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{Metric, Tier};
use gpufleet_schemas::record::*;
use gpufleet_schemas::wire::Encoder;
use proptest::prelude::*;

use super::*;
use crate::engine::book::TaskId;
use crate::engine::{Input, Machine, Output};

const START: i64 = 1_772_442_000 * SECOND;

/// A log of one partition that is written record by record.
#[derive(Default)]
struct Log {
    records: Vec<Telemetry>,
    seq: i64,
    epoch: i32,
}

impl Log {
    fn origin(&mut self, second: i64) -> Origin {
        self.seq += 1;
        Origin {
            host: "node".into(),
            boot_id: "boot".into(),
            seq: self.seq,
            reset_epoch: self.epoch,
            observed_at: START + second * SECOND,
            ..Origin::default()
        }
    }

    /// One GPU at one instant, and the tick of that second.
    fn sample(&mut self, second: i64, readings: &[(Metric, i64)]) -> &mut Log {
        let mut block = GpuBlock {
            gpu_uuid: "GPU-1".into(),
            gpu_index: Some(0),
            pci: Some("00000000:1b:00".into()),
            ..GpuBlock::default()
        };
        block.tier_ticks = [vec![0], vec![0], vec![0]];
        for (metric, value) in readings {
            block.series[metric.index()] = Series::dense(vec![*value]);
        }
        let origin = self.origin(second);
        self.records.push(Telemetry::Batch(GpuBatch {
            origin,
            ticks: vec![0],
            gpus: vec![block],
            ..GpuBatch::default()
        }));
        self.tick(second)
    }

    fn xid(&mut self, second: i64, code: i32) -> &mut Log {
        let origin = self.origin(second);
        let event = XidEvent {
            origin,
            kind: EventKind::Xid,
            code: Some(code),
            pci: Some("00000000:1b:00".into()),
            message: "text".into(),
            raw: "line".into(),
            ..XidEvent::default()
        };
        self.records.push(Telemetry::Event(event));
        self
    }

    fn tick(&mut self, second: i64) -> &mut Log {
        self.records.push(Telemetry::Tick(Tick { tick_at: START + second * SECOND, writer: "test".into() }));
        self
    }
}

fn run(records: &[Telemetry]) -> Vec<Incident> {
    let id = TaskId { log_id: "log".into(), topic: "gpu.telemetry".into(), partition: 0 };
    let mut task = Task::new(id, &DetectorsConfig::default());
    let (encoder, mut bytes, mut outputs) = (Encoder::default(), Vec::new(), Vec::new());
    for (offset, record) in (0..).zip(records) {
        encoder.telemetry(record, &mut bytes);
        task.step(Input { offset, appended_at: None, payload: &bytes }, &mut outputs);
    }
    let incidents = outputs.into_iter().filter_map(|output| match output {
        Output::Incident(incident) => Some(*incident),
        _ => None,
    });
    incidents.collect()
}

/// Kind, state, onset second and end second of each revision.
fn lives(incidents: &[Incident]) -> Vec<(&str, State, i64, Option<i64>)> {
    let second = |at: i64| (at - START) / SECOND;
    let life = |i: &'_ Incident| (i.state, second(i.onset_at), i.end_at.map(second));
    incidents
        .iter()
        .map(|i| {
            let (state, onset, end) = life(i);
            (i.kind.as_str(), state, onset, end)
        })
        .collect()
}

#[test]
fn heat_opens_once_and_resolves_five_minutes_after_its_last_throttled_sample() {
    let mut log = Log::default();
    for second in 0..900 {
        let throttled = (120..300).contains(&second) && second % 4 == 0;
        log.sample(
            second,
            &[(Metric::ClocksEventReasons, if throttled { 0x20 } else { 0 }), (Metric::TemperatureGpu, 80)],
        );
    }
    let incidents = run(&log.records);
    assert_eq!(
        lives(&incidents),
        [("thermal_throttle", State::Open, 120, None), ("thermal_throttle", State::Resolved, 120, Some(296))]
    );
    assert_eq!(incidents[0].severity, Severity::Warning);
    assert_eq!(incidents[1].evidence[0].name, "samples");
}

#[test]
fn hardware_thermal_slowdown_of_more_than_a_second_is_critical() {
    let mut log = Log::default();
    for second in 0..200 {
        log.sample(second, &[(Metric::ClocksEventReasons, if (100..103).contains(&second) { 0x48 } else { 0 })]);
    }
    assert_eq!(run(&log.records)[0].severity, Severity::Critical);
}

#[test]
fn what_only_looks_like_heat_stays_silent() {
    for (what, mask, celsius) in
        [("a power cap", 0x4, 88), ("a P-state change", 0x8, 60), ("heat without throttling", 0, 95)]
    {
        let mut log = Log::default();
        for second in 0..600 {
            log.sample(second, &[(Metric::ClocksEventReasons, mask), (Metric::TemperatureGpu, celsius)]);
        }
        assert_eq!(lives(&run(&log.records)), [], "{what}");
    }
    let mut hot = Log::default();
    for second in 0..600 {
        hot.sample(second, &[(Metric::ClocksEventReasons, 0x8), (Metric::TemperatureGpu, 88)]);
    }
    assert_eq!(run(&hot.records).len(), 1, "HW slowdown at a temperature that agrees is heat");
}

#[test]
fn too_few_samples_say_nothing() {
    let mut log = Log::default();
    log.sample(0, &[(Metric::ClocksEventReasons, 0)]).sample(1, &[(Metric::ClocksEventReasons, 0x20)]).tick(300);
    assert_eq!(lives(&run(&log.records)), []);
}

#[test]
fn one_uncorrectable_error_opens_and_a_healed_reset_resolves() {
    let mut log = Log::default();
    let counters =
        |dbe, pending| [(Metric::EccDbeVolatile, dbe), (Metric::RowRemapPending, pending), (Metric::RowRemapFailed, 0)];
    log.sample(0, &counters(2, 0)).sample(10, &counters(2, 0)).sample(20, &counters(3, 1)).sample(30, &counters(3, 1));
    log.epoch = 1;
    log.sample(60, &counters(0, 1)).sample(70, &counters(0, 0)).sample(200, &counters(0, 0));
    assert_eq!(
        lives(&run(&log.records)),
        [("ecc_uncorrectable", State::Open, 20, None), ("ecc_uncorrectable", State::Resolved, 20, Some(60))]
    );
}

#[test]
fn a_driver_reload_that_zeroes_counters_is_no_error_and_an_error_after_it_is() {
    let mut log = Log::default();
    let counters = |dbe, sbe| [(Metric::EccDbeVolatile, dbe), (Metric::EccSbeVolatile, sbe)];
    log.sample(0, &counters(5, 900)).sample(10, &counters(5, 900));
    log.epoch = 1;
    log.sample(20, &counters(0, 0)).sample(30, &counters(0, 0)).tick(100);
    assert_eq!(lives(&run(&log.records)), []);
    log.sample(110, &counters(1, 0)).tick(200);
    assert_eq!(lives(&run(&log.records)), [("ecc_uncorrectable", State::Open, 110, None)]);
}

#[test]
fn corrected_errors_alarm_when_they_come_fast_and_not_when_one_comes() {
    let mut log = Log::default();
    let mut errors = 0;
    for second in (0..3600).step_by(10) {
        errors += i64::from(second == 600);
        log.sample(second, &[(Metric::EccSbeVolatile, 7 + errors)]);
    }
    assert_eq!(lives(&run(&log.records)), [], "a single error");
    for second in (3600..4200).step_by(10) {
        errors += i64::from(second % 60 == 0);
        log.sample(second, &[(Metric::EccSbeVolatile, 7 + errors)]);
    }
    let incidents = run(&log.records);
    assert_eq!(lives(&incidents)[0], ("ecc_rate", State::Open, 600, None), "the excursion began with the first error");
}

#[test]
fn an_application_xid_resolves_when_quiet_and_a_hardware_xid_does_not() {
    let mut log = Log::default();
    log.sample(0, &[]).xid(10, 13).xid(20, 13).xid(30, 79).tick(40).tick(2000);
    let incidents = run(&log.records);
    let last = |code| incidents.iter().rfind(|incident| incident.code == Some(code)).expect("an incident");
    assert_eq!((last(13).state, last(13).end_at, last(13).count), (State::Resolved, Some(START + 20 * SECOND), 2));
    assert_eq!((last(79).state, last(79).severity), (State::Open, Severity::Critical));
    assert_eq!(last(79).gpu_uuid.as_deref(), Some("GPU-1"), "the slot's GPU is known from its batches");
    assert_eq!(last(79).actions[0], "RESTART_BM");
}

#[test]
fn an_xid_before_its_gpu_is_known_stays_one_incident() {
    let mut log = Log::default();
    log.xid(10, 79).tick(20).sample(30, &[]).xid(40, 79).tick(60);
    let incidents = run(&log.records);
    assert!(incidents.iter().all(|incident| incident.id == incidents[0].id), "{:?}", lives(&incidents));
}

#[test]
fn information_opens_nothing_and_an_unknown_code_is_major() {
    let mut log = Log::default();
    log.xid(10, 63).xid(11, 154).tick(60);
    assert_eq!(lives(&run(&log.records)), []);
    log.xid(70, 999).tick(120);
    assert_eq!(run(&log.records)[0].severity, Severity::Major);
}

#[test]
fn a_fatal_event_is_never_too_late() {
    let mut log = Log::default();
    log.sample(0, &[]).tick(1000).xid(100, 79).tick(1001);
    let incidents = run(&log.records);
    assert_eq!(lives(&incidents), [("xid", State::Open, 100, None)]);
    assert!(incidents[0].late);
}

#[test]
fn a_repeated_record_changes_nothing() {
    let mut log = Log::default();
    log.sample(0, &[]).xid(10, 13);
    let repeat = log.records.last().cloned().expect("a record");
    log.tick(20);
    let once = run(&log.records);
    log.records.insert(3, repeat);
    let twice = run(&log.records);
    assert_eq!((once[0].count, twice[0].count, once.len(), twice.len()), (1, 1, 1, 1));
}

/// An incident without what depends on the order of arrival.
fn canonical(incidents: &[Incident]) -> Vec<Incident> {
    let mut newest: std::collections::BTreeMap<String, Incident> = std::collections::BTreeMap::new();
    for incident in incidents {
        let plain =
            Incident { revision: 0, decided_at: 0, emit_seq: 0, first_offset: 0, last_offset: 0, ..incident.clone() };
        newest.insert(incident.id.clone(), plain);
    }
    newest.into_values().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Hosts differ by their disorder within the bound; the incidents are the same.
    #[test]
    fn incidents_do_not_depend_on_arrival_within_the_disorder_bound(delays in prop::collection::vec(0i64..4, 700), throttled in 100i64..300) {
        let mut log = Log::default();
        for second in 0..700 {
            let mask = if (100..100 + throttled).contains(&second) { 0x20 } else { 0 };
            let sbe = (second - 200).clamp(0, 40) / 4;
            log.sample(second, &[(Metric::ClocksEventReasons, mask), (Metric::EccSbeVolatile, sbe), (Metric::TemperatureGpu, 88)]);
        }
        let in_order = run(&log.records);
        let mut arrivals: Vec<(i64, usize)> = log.records.iter().enumerate().map(|(i, record)| {
            let second = (record.newest_at() - START) / SECOND;
            let delay = if matches!(record, Telemetry::Tick(_)) { 0 } else { delays[second as usize] };
            (second + delay, i)
        }).collect();
        arrivals.sort();
        // A number that comes after a higher one is a repeat: a shuffled log is one whose records are numbered as they come.
        let mut shuffled: Vec<Telemetry> = arrivals.iter().map(|(_, i)| log.records[*i].clone()).collect();
        for (seq, record) in shuffled.iter_mut().enumerate() {
            if let Telemetry::Batch(batch) = record { batch.origin.seq = seq as i64; }
        }
        prop_assert!(!in_order.is_empty());
        prop_assert_eq!(canonical(&run(&shuffled)), canonical(&in_order));
    }
}

#[test]
fn tiers_of_the_test_log_are_all_read() {
    let mut log = Log::default();
    log.sample(0, &[]);
    let Telemetry::Batch(batch) = &log.records[0] else { panic!("a batch") };
    assert_eq!(batch.tiers(&batch.gpus[0]), [Tier::Fast.bit() | Tier::Slow.bit() | Tier::Health.bit()]);
}

#[test]
fn a_minute_of_poison_is_a_gap_and_a_few_bad_records_are_none() {
    let id = TaskId { log_id: "log".into(), topic: "gpu.telemetry".into(), partition: 3 };
    let mut task = Task::new(id, &DetectorsConfig::default());
    let (encoder, mut bytes, mut outputs, mut offset) = (Encoder::default(), Vec::new(), Vec::new(), 0);
    for second in 0..1200 {
        // Two bad records in the third minute, nothing else but bad ones in the tenth.
        let bad = match second / 60 {
            2 => usize::from(second % 60 < 2),
            9 => 20,
            _ => 0,
        };
        for _ in 0..bad {
            task.step(Input { offset, appended_at: None, payload: b"poison" }, &mut outputs);
            offset += 1;
        }
        let tick = Telemetry::Tick(Tick { tick_at: START + second * SECOND, writer: "test".into() });
        encoder.telemetry(&tick, &mut bytes);
        task.step(Input { offset, appended_at: None, payload: &bytes }, &mut outputs);
        offset += 1;
    }
    let gaps: Vec<Incident> = outputs
        .into_iter()
        .filter_map(|output| match output {
            Output::Incident(incident) => Some(*incident),
            _ => None,
        })
        .collect();
    assert_eq!(task.counts().undecodable, 1202);
    let last = gaps.last().expect("a gap");
    assert!(gaps.iter().all(|gap| gap.kind == "coverage_gap" && gap.id == last.id), "{gaps:?}");
    assert_eq!((last.state, last.host.as_str()), (State::Resolved, "gpu.telemetry/3"));
    assert!(last.onset_at >= START + 480 * SECOND && last.end_at <= Some(START + 660 * SECOND), "{last:?}");
}
