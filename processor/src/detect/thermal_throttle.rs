//! `thermal_throttle`: a GPU is slowed down because it is too hot.
//!
//! Share f of a window's samples with SW thermal (0x20) or HW thermal (0x40) slowdown, k-of-n over sliding windows
//! (`docs/reference/detectors.md`). A power cap (0x4) is normal and no heat; HW slowdown (0x8) alone also marks P-state
//! changes, so it counts only at a temperature that agrees. It does not judge temperature itself: a hot GPU that runs
//! at full clock is not throttled.

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{Evidence, GpuBatch, GpuBlock, Severity};
use serde::{Deserialize, Serialize};

use super::config::ThermalThrottleConfig;
use super::{Detector, Source};
use crate::engine::finding::Offsets;
use crate::engine::{Entities, Finding, GpuId, Pane, Panes, Section, StateError};

const SW_THERMAL: i64 = 0x20;
const HW_THERMAL: i64 = 0x40;
const HW_SLOWDOWN: i64 = 0x8;

/// What a stretch of time shows of one GPU.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Heat {
    samples: i64,
    thermal: i64,
    hw_thermal: i64,
    /// HW slowdown without a thermal bit.
    hw_slowdown_only: i64,
    hottest_celsius: Option<i64>,
    slowest_megahertz: Option<i64>,
    first_heat_at: Option<i64>,
    last_heat_at: Option<i64>,
    first_slowdown_at: Option<i64>,
    last_slowdown_at: Option<i64>,
    offsets: Offsets,
}

fn least(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    a.into_iter().chain(b).min()
}

impl Pane for Heat {
    fn merge(&mut self, other: &Heat) {
        self.samples += other.samples;
        self.thermal += other.thermal;
        self.hw_thermal += other.hw_thermal;
        self.hw_slowdown_only += other.hw_slowdown_only;
        self.hottest_celsius = self.hottest_celsius.max(other.hottest_celsius);
        self.slowest_megahertz = least(self.slowest_megahertz, other.slowest_megahertz);
        self.first_heat_at = least(self.first_heat_at, other.first_heat_at);
        self.last_heat_at = self.last_heat_at.max(other.last_heat_at);
        self.first_slowdown_at = least(self.first_slowdown_at, other.first_slowdown_at);
        self.last_slowdown_at = self.last_slowdown_at.max(other.last_slowdown_at);
        self.offsets.merge(other.offsets);
    }
}

impl Heat {
    /// First sample that counts as throttled; HW slowdown alone does where the temperature agrees.
    fn first_throttled_at(&self, agrees: bool) -> Option<i64> {
        least(self.first_heat_at, self.first_slowdown_at.filter(|_| agrees))
    }

    fn last_throttled_at(&self, agrees: bool) -> Option<i64> {
        self.last_heat_at.max(self.last_slowdown_at.filter(|_| agrees))
    }
}

/// A span of throttling.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Episode {
    severity: Severity,
    onset_at: i64,
    last_bad_at: i64,
    end_at: Option<i64>,
    worst_share: f64,
    worst: Heat,
    offsets: Offsets,
}

/// The fold over one GPU's windows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    /// The newest windows, newest in bit 0, each set where it crossed the threshold.
    warning: u8,
    critical: u8,
    /// First throttled instant of the oldest window that still counts.
    onset_at: Option<i64>,
    clean_since: Option<i64>,
    open: Option<Episode>,
    closed: Option<Episode>,
}

#[derive(Serialize, Deserialize)]
struct Gpu {
    panes: Panes<Heat>,
    settled: State,
    settled_to: i64,
    /// Nothing but clean samples so far: there is nothing to fold.
    clean: bool,
}

/// The detector.
pub struct ThermalThrottle {
    config: ThermalThrottleConfig,
    known: Known,
}

/// Its state.
#[derive(Default, Serialize, Deserialize)]
struct Known {
    gpus: Vec<Option<Gpu>>,
    evaluated_to: Option<i64>,
}

impl ThermalThrottle {
    pub fn new(config: &ThermalThrottleConfig) -> ThermalThrottle {
        ThermalThrottle { config: config.clone(), known: Known::default() }
    }

    fn gpu(&mut self, id: GpuId) -> &mut Gpu {
        let gpus = &mut self.known.gpus;
        if gpus.len() <= id.index() {
            gpus.resize_with(id.index() + 1, || None);
        }
        let (slide, per_window) = (self.config.slide, self.config.window / self.config.slide);
        gpus[id.index()].get_or_insert_with(|| Gpu {
            panes: Panes::new(slide, per_window),
            settled: State::default(),
            settled_to: i64::MIN,
            clean: true,
        })
    }
}

impl Detector for ThermalThrottle {
    fn kind(&self) -> &'static str {
        "thermal_throttle"
    }

    fn block(&mut self, id: GpuId, batch: &GpuBatch, block: &GpuBlock, source: Source) {
        let gpu = self.gpu(id);
        for (tick, mask) in block.readings(Metric::ClocksEventReasons) {
            let at = batch.tick_at(tick);
            let Some(pane) = gpu.panes.at(at) else { continue };
            pane.samples += 1;
            if mask & (SW_THERMAL | HW_THERMAL | HW_SLOWDOWN) == 0 {
                continue;
            }
            gpu.clean = false;
            let heat = mask & (SW_THERMAL | HW_THERMAL) != 0;
            pane.thermal += i64::from(heat);
            pane.hw_thermal += i64::from(mask & HW_THERMAL != 0);
            pane.hw_slowdown_only += i64::from(!heat);
            let (first, last) = if heat {
                (&mut pane.first_heat_at, &mut pane.last_heat_at)
            } else {
                (&mut pane.first_slowdown_at, &mut pane.last_slowdown_at)
            };
            *first = least(*first, Some(at));
            *last = (*last).max(Some(at));
            pane.offsets.include(source.offset);
        }
        for (tick, celsius) in block.readings(Metric::TemperatureGpu) {
            if let Some(pane) = gpu.panes.at(batch.tick_at(tick)) {
                pane.hottest_celsius = pane.hottest_celsius.max(Some(celsius));
            }
        }
        if !gpu.clean {
            for (tick, megahertz) in block.readings(Metric::ClockSm) {
                if let Some(pane) = gpu.panes.at(batch.tick_at(tick)) {
                    pane.slowest_megahertz = least(pane.slowest_megahertz, Some(megahertz));
                }
            }
        }
    }

    fn advance(&mut self, now: i64, floor: i64, entities: &Entities, findings: &mut Vec<Finding>) -> bool {
        let end = now.div_euclid(self.config.slide) * self.config.slide;
        if self.known.evaluated_to.is_some_and(|before| end <= before) {
            return false;
        }
        self.known.evaluated_to = Some(end);
        for id in entities.ids() {
            let Some(gpu) = self.known.gpus.get_mut(id.index()).and_then(Option::as_mut) else { continue };
            if gpu.clean {
                gpu.panes.settle(floor);
                continue;
            }
            if gpu.settled_to == i64::MIN {
                gpu.settled_to = gpu.panes.iter().next().map_or(floor, |(start, _)| start);
            }
            for window_end in gpu.panes.ends(gpu.settled_to, floor) {
                gpu.settled.window(window_end, gpu.panes.window(window_end), &self.config);
            }
            gpu.settled_to = gpu.settled_to.max(floor);
            gpu.panes.settle(floor);
            let mut present = gpu.settled.clone();
            for window_end in gpu.panes.ends(gpu.settled_to, end) {
                present.window(window_end, gpu.panes.window(window_end), &self.config);
            }
            for episode in present.closed.iter().chain(&present.open) {
                findings.push(finding(episode, entities, id, &self.config));
            }
            gpu.clean = gpu.settled.is_clean()
                && present.is_clean()
                && gpu.panes.iter().all(|(_, pane)| pane.first_throttled_at(true).is_none());
        }
        true
    }

    fn too_late(&self) -> u64 {
        self.known.gpus.iter().flatten().map(|gpu| gpu.panes.too_late).sum()
    }

    fn save(&self) -> Section {
        Section::of(self.kind(), 1, &self.known)
    }

    fn load(&mut self, section: &Section) -> Result<(), StateError> {
        self.known = section.read(1)?;
        // Another configuration may have cut time differently: its panes cannot be cut anew, its episodes go on.
        let (slide, per_window) = (self.config.slide, self.config.window / self.config.slide);
        for gpu in self.known.gpus.iter_mut().flatten().filter(|gpu| !gpu.panes.are_of(slide, per_window)) {
            gpu.panes = Panes::new(slide, per_window);
        }
        Ok(())
    }
}

impl State {
    /// Nothing here could still make or change an incident.
    fn is_clean(&self) -> bool {
        self.open.is_none() && self.warning == 0 && self.critical == 0
    }

    fn window(&mut self, end: i64, window: Option<Heat>, config: &ThermalThrottleConfig) {
        let Some(window) = window.filter(|window| window.samples >= config.least_samples.max(1)) else { return };
        let agrees = window.hottest_celsius.is_some_and(|hottest| hottest >= config.hw_slowdown_celsius);
        let throttled = window.thermal + if agrees { window.hw_slowdown_only } else { 0 };
        let throttled = if throttled >= config.least_throttled_samples { throttled } else { 0 };
        let share = throttled as f64 / window.samples as f64;
        let hardware = window.hw_thermal as f64 / window.samples as f64 * config.window as f64;
        let at_once = throttled > 0 && hardware > config.hardware_slowdown as f64;
        let keep = |flags: u8, set: bool, of: u32| (flags << 1 | u8::from(set)) & ((1u16 << (of + 1).min(8)) - 1) as u8;
        // k of the last k + 1 windows.
        self.warning = keep(self.warning, share >= config.warning_share, config.warning_windows);
        self.critical = keep(self.critical, share >= config.critical_share, config.critical_windows);
        if share < config.warning_share && self.warning == 0 {
            self.onset_at = None;
        } else if throttled > 0 {
            self.onset_at = least(self.onset_at, window.first_throttled_at(agrees));
        }
        let critical = at_once || self.critical.count_ones() >= config.critical_windows;
        if critical || self.warning.count_ones() >= config.warning_windows {
            self.bad(&window, share, if critical { Severity::Critical } else { Severity::Warning });
        }
        self.clear(end, &window, window.last_throttled_at(agrees), share, config);
    }

    fn bad(&mut self, window: &Heat, share: f64, severity: Severity) {
        let onset_at = self.onset_at.or(window.first_throttled_at(true)).unwrap_or_default();
        let episode = self.open.get_or_insert_with(|| Episode {
            severity,
            onset_at,
            last_bad_at: onset_at,
            end_at: None,
            worst_share: share,
            worst: window.clone(),
            offsets: window.offsets,
        });
        episode.severity = episode.severity.max(severity);
        if share > episode.worst_share {
            episode.worst_share = share;
            episode.worst = window.clone();
        }
    }

    fn clear(&mut self, end: i64, window: &Heat, last_bad_at: Option<i64>, share: f64, config: &ThermalThrottleConfig) {
        let Some(episode) = &mut self.open else { return };
        episode.offsets.merge(window.offsets);
        episode.last_bad_at = episode.last_bad_at.max(last_bad_at.unwrap_or(i64::MIN));
        if share >= config.clear_share {
            self.clean_since = None;
            return;
        }
        let since = *self.clean_since.get_or_insert(end - config.window);
        if end - since >= config.clear {
            episode.end_at = Some(episode.last_bad_at);
            self.closed = self.open.take();
            self.clean_since = None;
            (self.warning, self.critical, self.onset_at) = (0, 0, None);
        }
    }
}

fn finding(episode: &Episode, entities: &Entities, id: GpuId, config: &ThermalThrottleConfig) -> Finding {
    let entity = entities.get(id).clone();
    let (worst, percent) = (&episode.worst, episode.worst_share * 100.0);
    let celsius = worst.hottest_celsius.map_or(String::new(), |celsius| format!(" at {celsius} °C"));
    let megahertz = worst.slowest_megahertz.map_or(String::new(), |mhz| format!(", clock down to {mhz} MHz"));
    let at = worst.first_throttled_at(true).unwrap_or(episode.onset_at);
    let reading = |name: &str, value: Option<i64>| {
        value.map(|value| Evidence { at, name: name.to_owned(), value, before: None, reset: false })
    };
    Finding {
        kind: "thermal_throttle",
        cause: None,
        subject: entity.gpu_uuid.clone().unwrap_or_default(),
        facet: String::new(),
        severity: episode.severity,
        onset_at: episode.onset_at,
        end_at: episode.end_at,
        late: false,
        code: None,
        statistic: "share of a window's samples throttled for heat",
        value: episode.worst_share,
        threshold: if episode.severity >= Severity::Critical { config.critical_share } else { config.warning_share },
        count: 1,
        summary: format!(
            "{} is throttled for heat: {percent:.0} % of {} s{celsius}{megahertz}",
            entity.text(),
            config.window / SECOND
        ),
        actions: vec![
            "check the slot's airflow, fans and inlet temperature".to_owned(),
            "drain the GPU if it stays".to_owned(),
            "re-seat or replace the heat sink".to_owned(),
        ],
        evidence: [
            reading("samples", Some(worst.samples)),
            reading("samples_throttled", Some(worst.thermal + worst.hw_slowdown_only)),
            reading("samples_hw_thermal", Some(worst.hw_thermal)),
            reading(Metric::TemperatureGpu.name(), worst.hottest_celsius),
            reading(Metric::ClockSm.name(), worst.slowest_megahertz),
        ]
        .into_iter()
        .flatten()
        .collect(),
        coverage: None,
        raw: None,
        offsets: episode.offsets,
        entity,
    }
}
