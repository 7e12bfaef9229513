//! `thermal_throttle`: k of the last k + 1 sliding windows have too many samples throttled for heat.
//!
//! Every window of the log is computed from its samples alone. Windows with too few samples say nothing: they are left
//! out of the row in which windows are counted, and a run goes on behind them.

use gpufleet_processor::detect::DetectorsConfig;
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::Severity;

use super::{Entity, Episode, Log, Who};

const HEAT: i64 = 0x20 | 0x40;
const HW_THERMAL: i64 = 0x40;
const HW_SLOWDOWN: i64 = 0x8;

/// A window that says something.
struct Window {
    end: i64,
    share: f64,
    /// Hardware thermal slowdown for so long that it is critical at once.
    hardware: bool,
    /// At least as many throttled samples as a window must have.
    throttled: bool,
    /// First and last throttled sample.
    first_at: Option<i64>,
    last_at: Option<i64>,
    /// First sample with heat, or with a slowdown that no temperature backs.
    first_suspect_at: Option<i64>,
}

pub(super) fn entities(log: &Log<'_>, config: &DetectorsConfig) -> Vec<Entity> {
    log.gpus()
        .into_iter()
        .map(|(host, uuid)| {
            let reasons = log.readings(host, uuid, Metric::ClocksEventReasons);
            let celsius = log.readings(host, uuid, Metric::TemperatureGpu);
            let episodes = episodes(&windows(&reasons, &celsius, config, log.until), config);
            let (host, subject, gpu) = (host.to_owned(), uuid.to_owned(), uuid.to_owned());
            Entity { who: Who { kind: "thermal_throttle", host, subject, gpu, memory: false }, episodes }
        })
        .collect()
}

/// The windows that closed by `until` and say something, in order.
fn windows(reasons: &[(i64, i64)], celsius: &[(i64, i64)], config: &DetectorsConfig, until: i64) -> Vec<Window> {
    let (slide, length) = (config.thermal_throttle.slide, config.thermal_throttle.window);
    let Some((first_at, _)) = reasons.first() else { return Vec::new() };
    let mut windows = Vec::new();
    let mut end = first_at.div_euclid(slide) * slide + slide;
    while end <= until {
        let within = |readings: &[(i64, i64)]| -> Vec<(i64, i64)> {
            readings.iter().copied().filter(|(at, _)| (end - length..end).contains(at)).collect()
        };
        windows.extend(window(end, &within(reasons), &within(celsius), config));
        end += slide;
    }
    windows
}

fn window(end: i64, reasons: &[(i64, i64)], celsius: &[(i64, i64)], config: &DetectorsConfig) -> Option<Window> {
    let rule = &config.thermal_throttle;
    let samples = i64::try_from(reasons.len()).ok().filter(|samples| *samples >= rule.least_samples.max(1))?;
    let hot = celsius.iter().any(|(_, celsius)| *celsius >= rule.hw_slowdown_celsius);
    let with = |mask: i64| -> Vec<i64> {
        reasons.iter().filter(|(_, reasons)| reasons & mask != 0).map(|(at, _)| *at).collect()
    };
    let throttled = with(if hot { HEAT | HW_SLOWDOWN } else { HEAT });
    let enough = throttled.len() as i64 >= rule.least_throttled_samples && !throttled.is_empty();
    let hardware = with(HW_THERMAL).len() as f64 / samples as f64 * rule.window as f64;
    Some(Window {
        end,
        share: if enough { throttled.len() as f64 / samples as f64 } else { 0.0 },
        hardware: enough && hardware > rule.hardware_slowdown as f64,
        throttled: enough,
        first_at: throttled.first().copied(),
        last_at: throttled.last().copied(),
        first_suspect_at: with(HEAT | HW_SLOWDOWN).first().copied(),
    })
}

fn episodes(windows: &[Window], config: &DetectorsConfig) -> Vec<Episode> {
    let rule = &config.thermal_throttle;
    let mut episodes = Vec::new();
    // What lies before the last resolution is forgotten.
    let mut rest = windows;
    while let Some(opens) = (0..rest.len()).find(|i| verdict(&rest[..=*i], config).is_some()) {
        let onset_at = onset(&rest[..=opens], config);
        let calm = |i: usize| rest[i].share < rule.clear_share;
        // The first window at which an unbroken run of calm ones is long enough.
        let closes = (opens..rest.len()).find(|i| {
            let calm_from = (opens..=*i).rev().take_while(|j| calm(*j)).last();
            calm_from.is_some_and(|j| rest[*i].end - (rest[j].end - rule.window) >= rule.clear)
        });
        let until = closes.unwrap_or(rest.len() - 1);
        let last_at = rest[opens..=until].iter().filter_map(|window| window.last_at).max();
        episodes.push(Episode {
            onset_at,
            end_at: closes.map(|_| last_at.unwrap_or(onset_at).max(onset_at)),
            resolved_at: closes.map(|i| rest[i].end),
            severity: (opens..=until).filter_map(|i| verdict(&rest[..=i], config)).max().unwrap_or_default(),
            code: None,
        });
        rest = &rest[until + 1..];
    }
    episodes
}

/// How bad the last of the windows is, with those before it; none where all is well.
fn verdict(windows: &[Window], config: &DetectorsConfig) -> Option<Severity> {
    let rule = &config.thermal_throttle;
    let reached = |share: f64, least: u32| {
        let count = newest(windows, least).iter().filter(|window| window.share >= share).count();
        count >= least as usize
    };
    if windows.last().is_some_and(|window| window.hardware) || reached(rule.critical_share, rule.critical_windows) {
        Some(Severity::Critical)
    } else if reached(rule.warning_share, rule.warning_windows) {
        Some(Severity::Warning)
    } else {
        None
    }
}

/// The last `k + 1` windows, eight at most.
fn newest(windows: &[Window], k: u32) -> &[Window] {
    let count = (k as usize + 1).min(8);
    &windows[windows.len().saturating_sub(count)..]
}

/// The first throttled sample of the windows that led here: back to where no window in sight had crossed the threshold.
fn onset(windows: &[Window], config: &DetectorsConfig) -> i64 {
    let rule = &config.thermal_throttle;
    let warned =
        |i: usize| newest(&windows[..=i], rule.warning_windows).iter().any(|window| window.share >= rule.warning_share);
    let led_here = (0..windows.len()).rev().take_while(|i| warned(*i));
    let first_at = led_here.filter(|i| windows[*i].throttled).filter_map(|i| windows[i].first_at).min();
    first_at.or_else(|| windows.last().and_then(|window| window.first_suspect_at)).unwrap_or_default()
}
