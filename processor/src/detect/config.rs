//! `detectors.toml`: every threshold, with the file's own values as defaults.

use std::path::Path;
use std::time::Duration;

use gpufleet_runtime::config;
use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::instant::SECOND;
use serde::{Deserialize, Deserializer};
use sha2::{Digest, Sha256};

use crate::engine::book::Spans;
use crate::engine::clock::Bounds;

/// The thresholds that ship with this version.
pub const DEFAULT: &str = include_str!("../../detectors.toml");

/// The kinds that can be switched off, one per detector.
pub const KINDS: [&str; 6] =
    ["xid", "ecc_uncorrectable", "ecc_rate", "thermal_throttle", "feed_over_rating", "coverage_gap"];

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetectorsConfig {
    pub engine: EngineConfig,
    pub xid: XidConfig,
    pub ecc_uncorrectable: EccUncorrectableConfig,
    pub ecc_rate: EccRateConfig,
    pub thermal_throttle: ThermalThrottleConfig,
    pub feed_over_rating: FeedOverRatingConfig,
    pub coverage_gap: CoverageGapConfig,
}

/// Spans are microseconds once read.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    #[serde(deserialize_with = "span")]
    pub disorder_bound: i64,
    #[serde(deserialize_with = "span")]
    pub allowed_lateness: i64,
    #[serde(deserialize_with = "span")]
    pub future_bound: i64,
    #[serde(deserialize_with = "span")]
    pub future_horizon: i64,
    #[serde(deserialize_with = "span")]
    pub flap_guard: i64,
    #[serde(deserialize_with = "span")]
    pub cause_window: i64,
    #[serde(deserialize_with = "span")]
    pub tombstone_after: i64,
    #[serde(deserialize_with = "span")]
    pub exclude_after: i64,
}

impl EngineConfig {
    pub fn bounds(&self) -> Bounds {
        Bounds { disorder: self.disorder_bound, future: self.future_bound, horizon: self.future_horizon }
    }

    pub fn spans(&self) -> Spans {
        Spans { flap_guard: self.flap_guard, cause_window: self.cause_window, tombstone_after: self.tombstone_after }
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XidConfig {
    pub enabled: bool,
    #[serde(deserialize_with = "span")]
    pub application_quiet: i64,
    #[serde(deserialize_with = "span")]
    pub hardware_quiet: i64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EccUncorrectableConfig {
    pub enabled: bool,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EccRateConfig {
    pub enabled: bool,
    pub prior_errors: f64,
    pub prior_hours: f64,
    pub lowest_rate_per_hour: f64,
    pub highest_rate_per_hour: f64,
    pub rate_ratio: f64,
    pub least_rate_per_hour: f64,
    pub cusum_threshold: f64,
    #[serde(deserialize_with = "span")]
    pub quiet: i64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThermalThrottleConfig {
    pub enabled: bool,
    #[serde(deserialize_with = "span")]
    pub window: i64,
    #[serde(deserialize_with = "span")]
    pub slide: i64,
    pub least_samples: i64,
    pub least_throttled_samples: i64,
    pub warning_share: f64,
    pub warning_windows: u32,
    pub critical_share: f64,
    pub critical_windows: u32,
    #[serde(deserialize_with = "span")]
    pub hardware_slowdown: i64,
    pub hw_slowdown_celsius: i64,
    pub clear_share: f64,
    #[serde(deserialize_with = "span")]
    pub clear: i64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeedOverRatingConfig {
    pub enabled: bool,
    #[serde(deserialize_with = "span")]
    pub pane: i64,
    pub open_share: f64,
    pub open_panes: u32,
    pub critical_share: f64,
    pub clear_share: f64,
    pub clear_panes: u32,
    pub least_coverage: f64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoverageGapConfig {
    pub enabled: bool,
    pub undecodable_share: f64,
    pub least_undecodable: u32,
    #[serde(deserialize_with = "span")]
    pub clear: i64,
}

fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let text = String::deserialize(deserializer)?;
    let span: Duration = humantime::parse_duration(&text)
        .map_err(|error| serde::de::Error::custom(format!("{text:?} is no span such as \"15s\" ({error})")))?;
    i64::try_from(span.as_micros()).map_err(|_| serde::de::Error::custom(format!("{text:?} is too long")))
}

impl Default for DetectorsConfig {
    fn default() -> DetectorsConfig {
        config::parse(DEFAULT, "detectors.toml").expect("the embedded thresholds are valid; a test holds that")
    }
}

impl DetectorsConfig {
    /// The shipped thresholds with the file's keys over them.
    pub fn load(file: Option<&Path>) -> Result<DetectorsConfig, Failure> {
        let Some(path) = file else { return Ok(DetectorsConfig::default()) };
        let name = path.display().to_string();
        let over: toml::Table = config::load(path)?;
        let mut merged: toml::Table = config::parse(DEFAULT, "detectors.toml")?;
        merge(&mut merged, over, "").map_err(|problem| Failure::config(format!("{name}: {problem}")))?;
        let config: DetectorsConfig = toml::Value::Table(merged).try_into().map_err(|error: toml::de::Error| {
            Failure::config(format!("{name}: {}", error.message().replace('\n', " ")))
        })?;
        config.check().map_err(|problem| Failure::config(format!("{name}: {problem}")))?;
        Ok(config)
    }

    /// Version of the rules: of their code and of these thresholds. A snapshot is continued by its own version, and taken
    /// over by any other.
    pub fn version(&self) -> String {
        let sum = Sha256::digest(format!("{self:?}"));
        let config = sum[..4].iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        format!("{}-{}-{config}", env!("CARGO_PKG_VERSION"), env!("GPUFLEET_RULES"))
    }

    /// Switches a kind off.
    pub fn disable(&mut self, kind: &str) -> Result<(), Failure> {
        let enabled = match kind {
            "xid" => &mut self.xid.enabled,
            "ecc_uncorrectable" => &mut self.ecc_uncorrectable.enabled,
            "ecc_rate" => &mut self.ecc_rate.enabled,
            "thermal_throttle" => &mut self.thermal_throttle.enabled,
            "feed_over_rating" => &mut self.feed_over_rating.enabled,
            "coverage_gap" => &mut self.coverage_gap.enabled,
            _ => return Err(Failure::usage(format!("no detector is called {kind}; there are {}", KINDS.join(", ")))),
        };
        *enabled = false;
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let thermal = &self.thermal_throttle;
        if thermal.slide <= 0 || thermal.window < thermal.slide || thermal.window % thermal.slide != 0 {
            return Err("thermal_throttle.window must be a multiple of thermal_throttle.slide".to_owned());
        }
        if !(1..=8).contains(&thermal.warning_windows) || !(1..=8).contains(&thermal.critical_windows) {
            return Err("thermal_throttle.warning_windows and critical_windows must lie between 1 and 8".to_owned());
        }
        let feed = &self.feed_over_rating;
        if feed.pane <= 0 || feed.pane % SECOND != 0 || feed.pane > 60 * SECOND {
            return Err("feed_over_rating.pane must be whole seconds, at most 60".to_owned());
        }
        let shares = [feed.open_share, feed.critical_share, feed.clear_share, self.coverage_gap.undecodable_share];
        if shares.iter().any(|share| !share.is_finite() || *share <= 0.0) || feed.clear_share > feed.open_share {
            return Err("the shares must be positive, and feed_over_rating.clear_share at most open_share".to_owned());
        }
        if feed.open_panes == 0 || feed.clear_panes == 0 || !(0.0..=1.0).contains(&feed.least_coverage) {
            return Err(
                "feed_over_rating.open_panes and clear_panes must be 1 or more, least_coverage between 0 and 1"
                    .to_owned(),
            );
        }
        let rate = &self.ecc_rate;
        let positive = [
            rate.prior_errors,
            rate.prior_hours,
            rate.lowest_rate_per_hour,
            rate.highest_rate_per_hour,
            rate.least_rate_per_hour,
            rate.cusum_threshold,
        ];
        if positive.iter().any(|value| !value.is_finite() || *value <= 0.0)
            || rate.rate_ratio.is_nan()
            || rate.rate_ratio <= 1.0
        {
            return Err("the rates of ecc_rate must be positive, and rate_ratio above 1".to_owned());
        }
        Ok(())
    }
}

fn merge(base: &mut toml::Table, over: toml::Table, path: &str) -> Result<(), String> {
    for (key, value) in over {
        let known = base.keys().cloned().collect::<Vec<_>>().join(", ");
        match (base.get_mut(&key), value) {
            (None, _) => return Err(format!("unknown key {path}{key}; there are {known}")),
            (Some(toml::Value::Table(inner)), toml::Value::Table(value)) => {
                merge(inner, value, &format!("{path}{key}."))?
            }
            (Some(slot), value) => *slot = value,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<DetectorsConfig, Failure> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("writes");
        DetectorsConfig::load(Some(file.path()))
    }

    #[test]
    fn a_file_overrides_single_thresholds() {
        let config = load("[thermal_throttle]\nwarning_share = 0.2\n").expect("loads");
        assert!((config.thermal_throttle.warning_share - 0.2).abs() < 1e-12);
        assert_eq!(config.ecc_rate, DetectorsConfig::default().ecc_rate);
        assert_eq!(config.engine.allowed_lateness, 30_000_000);
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named() {
        for (text, says) in [
            ("[thermal_throttle]\nwarning_shere = 0.2\n", "unknown key thermal_throttle.warning_shere"),
            ("[thermal_throttle]\nwindow = \"61s\"\n", "multiple"),
            ("[ecc_rate]\nquiet = 3\n", "invalid type"),
            ("[ecc_rate]\nrate_ratio = nan\n", "rate_ratio"),
            ("[xid\n", "line 1"),
        ] {
            let failure = load(text).expect_err(text);
            assert!(failure.message.contains(says), "{failure}");
            assert_eq!(failure.fault.code(), 3);
        }
    }
}
