//! Instants are microseconds UTC since 1970, everywhere.

/// Microseconds in a second.
pub const SECOND: i64 = 1_000_000;
/// Microseconds in a day.
pub const DAY: i64 = 86_400 * SECOND;

/// Days since 1970 of an instant: the `date` that a row is filed under.
pub fn date_of(at: i64) -> i32 {
    i32::try_from(at.div_euclid(DAY)).unwrap_or(0)
}

/// RFC 3339 in UTC with milliseconds, for people: `2026-03-02T09:00:00.112Z`.
pub fn text(at: i64) -> String {
    let (days, of_day) = (at.div_euclid(DAY), at.rem_euclid(DAY));
    let (year, month, day) = civil(days);
    let seconds = of_day / SECOND;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        of_day % SECOND / 1000
    )
}

/// Civil date of a day count (Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_reads_as_rfc_3339() {
        assert_eq!(text(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(text(1_772_442_000_112_999), "2026-03-02T09:00:00.112Z");
        assert_eq!(text(-1), "1969-12-31T23:59:59.999Z");
        assert_eq!(text(951_782_400 * SECOND), "2000-02-29T00:00:00.000Z");
    }

    #[test]
    fn a_date_changes_at_midnight_utc() {
        assert_eq!(date_of(DAY - 1), 0);
        assert_eq!(date_of(DAY), 1);
        assert_eq!(date_of(-1), -1);
    }
}
