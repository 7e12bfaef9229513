//! The faults of a random log: drawn before anything is read, so that every reading follows from the plan.
//!
//! Each GPU gets one story of heat, one of corrected and one of uncorrected errors, dealt so that a fleet of twelve has
//! them all. Steps of a counter keep away from driver reloads, where nobody could tell on which side they fell.

use std::ops::Range;

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::record::{EventKind, Labels};
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::{START, feed_keys};

/// What a GPU draws when nothing is wrong.
pub(super) const WATTS: i64 = 300;
/// Application codes first.
const CODES: [i32; 7] = [13, 31, 43, 74, 79, 119, 999];
/// Feeds of one host after the other.
const FEEDS: [&[&str]; 3] = [&["A"], &["B"], &["A", "B"]];
const INFORMATION: [i32; 2] = [63, 154];
/// Pairs of GPU and code of which each gives an incident.
const XIDS: usize = 28;

pub(super) struct Host {
    pub(super) name: String,
    pub(super) labels: Labels,
    /// When within five seconds it samples.
    pub(super) phase: i64,
    pub(super) gpus: Vec<Gpu>,
    /// In time order.
    pub(super) reloads: Vec<Reload>,
    pub(super) boosts: Vec<Boost>,
    pub(super) silence: Option<Range<i64>>,
    pub(super) facts: Vec<Fact>,
}

pub(super) struct Gpu {
    pub(super) uuid: String,
    pub(super) pci: String,
    pub(super) usual_celsius: i64,
    pub(super) heats: Vec<Heat>,
    pub(super) corrected: Counter,
    pub(super) uncorrected: Counter,
    /// Whether the volatile counter of uncorrected errors is supported.
    pub(super) counts_volatile: bool,
    /// Whether an uncorrected error leaves a remapping for the next reset.
    pub(super) remaps: bool,
    pub(super) remap_failed_at: Option<i64>,
}

/// A span in which samples are throttled by chance.
pub(super) struct Heat {
    span: Range<i64>,
    pub(super) chance: f64,
    pub(super) reasons: i64,
    pub(super) celsius: i64,
}

/// Errors by instant, and what the counter showed before the log.
pub(super) struct Counter {
    before: i64,
    pub(super) steps: Vec<(i64, i64)>,
}

/// The driver is loaded anew: volatile counters start from zero.
pub(super) struct Reload {
    pub(super) at: i64,
    /// How long before nothing is read.
    pub(super) outage: i64,
    /// It is the whole host that starts anew.
    pub(super) reboots: bool,
    /// Pending remappings are done.
    pub(super) heals: bool,
}

/// A span in which the host's GPUs draw so many percent of what they usually do.
pub(super) struct Boost {
    span: Range<i64>,
    pub(super) percent: i64,
}

/// An event to come.
pub(super) struct Fact {
    pub(super) at: i64,
    pub(super) gpu: usize,
    pub(super) kind: EventKind,
    pub(super) code: Option<i32>,
}

impl Counter {
    fn errors(&self, after: i64, until: i64) -> i64 {
        self.steps.iter().filter(|(at, _)| after < *at && *at <= until).map(|(_, errors)| errors).sum()
    }

    pub(super) fn volatile(&self, reloaded_at: Option<i64>, at: i64) -> i64 {
        match reloaded_at {
            Some(reloaded_at) => self.errors(reloaded_at, at),
            None => self.before + self.errors(i64::MIN, at),
        }
    }

    /// The board had more errors before the driver was loaded.
    pub(super) fn aggregate(&self, at: i64) -> i64 {
        self.before + 2 + self.errors(i64::MIN, at)
    }
}

impl Gpu {
    pub(super) fn heat(&self, at: i64) -> Option<&Heat> {
        self.heats.iter().find(|heat| heat.span.contains(&at))
    }
}

impl Boost {
    pub(super) fn covers(&self, at: i64) -> bool {
        self.span.contains(&at)
    }
}

impl Host {
    fn fact(&mut self, at: i64, gpu: usize, code: i32) {
        self.facts.push(Fact { at, gpu, kind: EventKind::Xid, code: Some(code) });
    }

    /// The instant, or a later one that no reload is near.
    fn apart_from_reloads(&self, at: i64) -> i64 {
        let near = |at: i64| self.reloads.iter().find(|r| (r.at - 90 * SECOND..r.at + 30 * SECOND).contains(&at));
        near(at).map_or(at, |reload| reload.at + 30 * SECOND)
    }
}

/// A fleet with its faults over `span` microseconds.
pub(super) fn hosts(rng: &mut ChaCha8Rng, count: usize, gpus_per_host: usize, span: i64) -> Vec<Host> {
    let mut hosts: Vec<Host> = (0..count).map(|number| host(rng, number, gpus_per_host)).collect();
    for (number, host) in hosts.iter_mut().enumerate() {
        plant_reloads(rng, host, number, span);
    }
    let mut places: Vec<(usize, usize)> =
        (0..count).flat_map(|host| (0..gpus_per_host).map(move |gpu| (host, gpu))).collect();
    let mut deal = |rng: &mut ChaCha8Rng, plant: fn(&mut ChaCha8Rng, &mut Host, usize, usize, i64)| {
        places.shuffle(rng);
        for (story, (host, gpu)) in places.iter().enumerate() {
            plant(rng, &mut hosts[*host], *gpu, story, span);
        }
    };
    deal(rng, plant_heat);
    deal(rng, plant_corrected);
    deal(rng, plant_uncorrected);
    plant_xids(rng, &mut hosts, &places, span);
    plant_overloads(rng, &mut hosts, span);
    if count > 1 {
        let from = moment(rng, span, 0.6, 0.9);
        let for_good = rng.random_bool(0.5);
        let until = if for_good { START + span } else { from + rng.random_range(120..400_i64) * SECOND };
        hosts[rng.random_range(1..count)].silence = Some(from..until);
    }
    hosts
}

fn host(rng: &mut ChaCha8Rng, number: usize, gpus_per_host: usize) -> Host {
    let name = format!("node-{number:02}");
    let gpus = (0..gpus_per_host)
        .map(|gpu| Gpu {
            uuid: format!("GPU-{number:02}-{gpu}"),
            pci: format!("00000000:{:02x}:00", 0x1b + 8 * gpu),
            usual_celsius: rng.random_range(55..75),
            heats: Vec::new(),
            corrected: Counter { before: rng.random_range(0..4), steps: Vec::new() },
            uncorrected: Counter { before: i64::from(rng.random_bool(0.2)), steps: Vec::new() },
            counts_volatile: true,
            remaps: rng.random_bool(0.5),
            remap_failed_at: None,
        })
        .collect();
    let feeds = FEEDS[number % 3];
    let labels = Labels {
        // One host in six has no site: its feed is another one than that of the same name.
        site: (number % 6 != 3).then(|| "north".to_owned()),
        rack: Some(format!("r{}", number / 3)),
        feeds: feeds.iter().map(|feed| (*feed).to_owned()).collect(),
        ..Labels::default()
    };
    let phase = rng.random_range(0..2900_i64) * 1000;
    let (reloads, boosts, facts) = (Vec::new(), Vec::new(), Vec::new());
    Host { name, labels, phase, gpus, reloads, boosts, silence: None, facts }
}

/// An instant within a part of the span, in whole milliseconds.
fn moment(rng: &mut ChaCha8Rng, span: i64, from: f64, to: f64) -> i64 {
    START + (span as f64 * rng.random_range(from..to)) as i64 / 1000 * 1000
}

/// So much later, in whole milliseconds.
fn later(rng: &mut ChaCha8Rng, at: i64, seconds: Range<f64>) -> i64 {
    at + (SECOND as f64 * rng.random_range(seconds)) as i64 / 1000 * 1000
}

fn plant_reloads(rng: &mut ChaCha8Rng, host: &mut Host, number: usize, span: i64) {
    let count = if number % 6 == 1 { 2 } else { rng.random_range(0..3) };
    let mut at = moment(rng, span, 0.35, 0.6);
    for _ in 0..count {
        let (reboots, heals) = (rng.random_bool(0.25), rng.random_bool(0.75));
        host.reloads.push(Reload { at, outage: rng.random_range(20..60_i64) * SECOND, reboots, heals });
        at = later(rng, at, 300.0..600.0);
    }
}

fn plant_heat(rng: &mut ChaCha8Rng, host: &mut Host, gpu: usize, story: usize, span: i64) {
    let at = moment(rng, span, 0.05, 0.5);
    let heats = &mut host.gpus[gpu].heats;
    let mut heat = |from: i64, seconds: i64, chance: f64, reasons: i64, celsius: i64| {
        heats.push(Heat { span: from..from + seconds * SECOND, chance, reasons, celsius });
    };
    match story % 9 {
        1 => heat(at, rng.random_range(120..300), 0.5, 0x20, 86),
        // About the threshold of a warning, and that of a critical one.
        2 => heat(at, rng.random_range(200..400), rng.random_range(0.1..0.35), 0x20, 84),
        // Back within the flap guard.
        3 => {
            heat(at, rng.random_range(60..150), 0.8, 0x20, 86);
            heat(at + rng.random_range(520..800_i64) * SECOND, rng.random_range(60..150), 0.5, 0x20, 86);
        }
        4 => heat(at, rng.random_range(60..200), 0.6, 0x8, 88),
        5 => heat(at, rng.random_range(60..200), 0.6, 0x8, rng.random_range(83..87)),
        6 => heat(at, rng.random_range(5..16), 1.0, 0x48, 80),
        // Still open at the end.
        7 => heat(moment(rng, span, 0.85, 0.9), span / SECOND, 0.7, 0x60, 90),
        8 => heat(START, span / SECOND, 0.04, 0x20, 82),
        _ => {}
    }
}

fn plant_corrected(rng: &mut ChaCha8Rng, host: &mut Host, gpu: usize, story: usize, span: i64) {
    let at = moment(rng, span, 0.05, 0.6);
    let mut steps: Vec<(i64, i64)> = Vec::new();
    match story % 4 {
        // A burst.
        1 => {
            for _ in 0..rng.random_range(1..6) {
                steps.push((later(rng, at, 0.0..60.0), rng.random_range(1..6)));
            }
        }
        // A drip.
        2 => {
            let mut at = moment(rng, span, 0.05, 0.2);
            for _ in 0..rng.random_range(3..8) {
                steps.push((at, 1));
                at = later(rng, at, 60.0..480.0);
            }
        }
        // About the threshold.
        3 => {
            steps.push((at, 2));
            steps.push((later(rng, at, 60.0..900.0), rng.random_range(0..3)));
        }
        _ => {}
    }
    let steps = steps.into_iter().map(|(at, errors)| (host.apart_from_reloads(at), errors)).collect();
    host.gpus[gpu].corrected.steps = steps;
}

/// Uncorrected errors and the Xids that go with them. Where errors come again, no Xid does, so that which incident has
/// the page is never a matter of a relapse.
fn plant_uncorrected(rng: &mut ChaCha8Rng, host: &mut Host, gpu: usize, story: usize, span: i64) {
    let at = moment(rng, span, 0.1, 0.6);
    let at = host.apart_from_reloads(at);
    let mut errors_at = Vec::new();
    // Events lie between the milliseconds: no reading and no reset is of the same instant.
    let between = |at: i64| at + 7;
    match story % 8 {
        1 => errors_at.extend([at, moment(rng, span, 0.65, 0.9)]),
        2 => {
            host.fact(between(at), gpu, 48);
            host.fact(between(later(rng, at, 0.5..3.0)), gpu, INFORMATION[0]);
            errors_at.push(later(rng, at, 1.0..8.0));
        }
        3 => {
            errors_at.push(at);
            host.fact(between(later(rng, at, 2.0..20.0)), gpu, 94);
        }
        // About as far apart as one cause may be.
        4 => {
            host.fact(between(at), gpu, 48);
            errors_at.push(later(rng, at, 90.0..150.0));
        }
        5 => {
            host.fact(between(at), gpu, 48);
            host.fact(between(later(rng, at, 1.0..5.0)), gpu, 94);
            host.fact(between(later(rng, at, 100.0..140.0)), gpu, 95);
        }
        6 => {
            host.fact(between(at), gpu, 64);
            host.gpus[gpu].remap_failed_at = Some(later(rng, at, 0.0..10.0));
        }
        7 => {
            host.gpus[gpu].counts_volatile = false;
            errors_at.push(at);
        }
        _ => {}
    }
    let count = |at: i64| (host.apart_from_reloads(at), 1);
    let steps = errors_at.into_iter().map(count).collect();
    host.gpus[gpu].uncorrected.steps = steps;
}

fn plant_xids(rng: &mut ChaCha8Rng, hosts: &mut [Host], places: &[(usize, usize)], span: i64) {
    // Resolves, comes back within the flap guard, and resolves again.
    if let Some(host) = hosts.first_mut().filter(|host| !host.gpus.is_empty()) {
        let at = START + 180 * SECOND + 7;
        host.fact(at, 0, 13);
        host.fact(later(rng, at, 900.0..1000.0), 0, 13);
    }
    let mut pairs: Vec<(usize, usize, i32)> =
        places.iter().flat_map(|(host, gpu)| CODES.iter().map(move |code| (*host, *gpu, *code))).collect();
    pairs.retain(|pair| *pair != (0, 0, 13));
    pairs.shuffle(rng);
    for (host, gpu, code) in pairs.into_iter().take(XIDS) {
        let host = &mut hosts[host];
        let mut at = moment(rng, span, 0.05, 0.8) + 7;
        if code == 79 {
            // The kernel's plain sentence, or what NVML says, has no code and comes once.
            let kind = if rng.random_bool(0.5) { EventKind::FellOff } else { EventKind::GpuLost };
            host.facts.push(Fact { at: later(rng, at, 0.1..0.9), gpu, kind, code: None });
        }
        for _ in 0..rng.random_range(1..5) {
            host.fact(at, gpu, code);
            // A storm, about the quiet time of an application, or long after.
            let gap = [0.2..30.0, 0.2..30.0, 590.0..610.0, 1200.0..1500.0][rng.random_range(0..4_usize)].clone();
            at = later(rng, at, gap);
        }
    }
    for code in INFORMATION.into_iter().cycle().take(4) {
        let Some((host, gpu)) = places.get(rng.random_range(0..places.len().max(1))) else { continue };
        hosts[*host].fact(moment(rng, span, 0.1, 0.9) + 7, *gpu, code);
    }
}

/// On every feed a heavy overload, another one within the flap guard, and some about the thresholds.
fn plant_overloads(rng: &mut ChaCha8Rng, hosts: &mut [Host], span: i64) {
    let mut keys: Vec<String> = hosts.iter().flat_map(|host| feed_keys(&host.labels)).collect();
    keys.sort();
    keys.dedup();
    for key in keys {
        let mut overload = |from: i64, seconds: i64, percent: i64| {
            for host in hosts.iter_mut().filter(|host| feed_keys(&host.labels).contains(&key)) {
                host.boosts.push(Boost { span: from..from + seconds * SECOND, percent });
            }
        };
        overload(moment(rng, span, 0.08, 0.2), rng.random_range(60..200), 140);
        overload(moment(rng, span, 0.4, 0.55), rng.random_range(60..300), rng.random_range(122..140));
        for _ in 0..3 {
            overload(moment(rng, span, 0.1, 0.95), rng.random_range(10..100), rng.random_range(108..133));
        }
    }
}
