//! Options that every command that reads recordings shares.

use clap::Args;
use gpufleet_runtime::exit::Failure;
use gpufleet_schemas::record::Labels;

use crate::source::recording::RecordingOptions;

/// How files without a host, zone or year are to be understood.
#[derive(Args, Clone, Debug)]
pub struct RecordingArgs {
    /// Host of files that name none (default: the file's name without its ending)
    #[arg(long, value_name = "HOST")]
    pub host: Option<String>,
    /// Offset of local times from UTC, such as +01:00
    #[arg(long, value_name = "OFFSET", default_value = "+00:00", allow_hyphen_values = true)]
    pub tz: String,
    /// Year of stamps that have none (default: that of the file's last change)
    #[arg(long, value_name = "YEAR")]
    pub year: Option<i32>,
}

impl RecordingArgs {
    /// The options; `as_new` gives the files an identity that no import had before.
    pub fn options(&self, as_new: bool) -> Result<RecordingOptions, Failure> {
        let tz_offset_seconds = parse_offset(&self.tz)
            .ok_or_else(|| Failure::usage(format!("--tz {} is no offset such as +01:00, -0530 or Z", self.tz)))?;
        Ok(RecordingOptions {
            host: self.host.clone(),
            tz_offset_seconds,
            year: self.year,
            labels: Labels::default(),
            salt: as_new.then(|| uuid::Uuid::new_v4().simple().to_string()[..8].to_owned()),
        })
    }
}

fn parse_offset(text: &str) -> Option<i32> {
    if matches!(text, "Z" | "z" | "UTC" | "utc") {
        return Some(0);
    }
    let (sign, rest) = match text.split_at_checked(1)? {
        ("+", rest) => (1, rest),
        ("-", rest) => (-1, rest),
        _ => return None,
    };
    let digits: String = rest.chars().filter(|c| *c != ':').collect();
    let (hours, minutes) = match digits.len() {
        2 => (digits.parse::<i32>().ok()?, 0),
        4 => (digits[..2].parse::<i32>().ok()?, digits[2..].parse::<i32>().ok()?),
        _ => return None,
    };
    (hours <= 14 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_read_in_the_ways_people_write_it() {
        for (text, seconds) in [("+01:00", 3600), ("-0530", -19_800), ("+02", 7200), ("Z", 0)] {
            assert_eq!(parse_offset(text), Some(seconds), "{text}");
        }
        for text in ["", "1", "+1:00", "+25:00", "CET", "+aa:bb"] {
            assert_eq!(parse_offset(text), None, "{text}");
        }
    }
}
