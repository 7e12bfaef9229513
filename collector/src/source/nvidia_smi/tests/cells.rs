use super::*;
use crate::source::nvidia_smi::cell::timestamp;

#[test]
fn a_value_is_the_same_with_its_unit_in_the_cell_in_the_header_or_nowhere() {
    for (metric, column, unit, number, want) in [
        (Metric::PowerDraw, "power.draw", "W", "688.12", 688_120),
        (Metric::PowerLimit, "enforced.power.limit", "W", "700.00", 700_000),
        (Metric::MemoryUsed, "memory.used", "MiB", "70123", 70_123 << 20),
        (Metric::ClockSm, "clocks.current.sm", "MHz", "1755", 1755),
        (Metric::UtilizationGpu, "utilization.gpu", "%", "97", 97),
        (Metric::FanSpeed, "fan.speed", "%", "30", 30),
    ] {
        for (header, text) in [
            (format!("{column} [{unit}]"), format!("{number} {unit}")),
            (format!("{column} [{unit}]"), number.to_owned()),
            (column.to_owned(), format!("{number} {unit}")),
            (column.to_owned(), number.to_owned()),
            (format!("{column}[{unit}]"), format!("{number}{unit}")),
        ] {
            let read = cell(&header, &text);
            assert_eq!(read.only(metric), Some(want), "{header}: {text}");
            assert!(read.losses.is_empty(), "{:?}", read.losses);
        }
    }
    assert_eq!(cell("power.draw [mW]", "688120").only(Metric::PowerDraw), Some(688_120));
    assert_eq!(cell("power.draw [W]", "688120 mW").only(Metric::PowerDraw), Some(688_120));
    assert_eq!(cell("memory.total [MB]", "4799 MB").only(Metric::MemoryTotal), Some(4799 << 20));
}

#[test]
fn decimals_are_exact_and_rounded_only_below_the_unit() {
    for (text, want) in
        [("0.01 W", 10), ("688.1234 W", 688_123), ("688.1235 W", 688_124), ("1105.29 W", 1_105_290), ("90 W", 90_000)]
    {
        assert_eq!(cell("power.draw [W]", text).only(Metric::PowerDraw), Some(want), "{text}");
    }
    assert_eq!(cell("temperature.gpu", "-5").only(Metric::TemperatureGpu), Some(-5));
    assert_eq!(cell("temperature.gpu", "41.0").only(Metric::TemperatureGpu), Some(41));
}

#[test]
fn every_wording_of_not_available_is_absent_and_no_loss() {
    for text in [
        "N/A",
        "[N/A]",
        "[Not Supported]",
        "Not Supported",
        "[Unknown Error]",
        "Unknown Error",
        "[Insufficient Permissions]",
        "-",
        "",
        "[GPU requires reset]",
        "ERR!",
        "[Not Found]",
        "[Function Not Found]",
        "[Unknown error]",
        "n/a",
        "[ N/A ]",
        "[Requested functionality has been deprecated]",
    ] {
        for column in
            ["temperature.gpu", "power.draw [W]", "clocks_event_reasons.active", "remapped_rows.pending", "pstate"]
        {
            let read = cell(column, text);
            assert_eq!(read.counts.rows, 1, "{column} {text}");
            assert!(read.losses.is_empty() && read.events.is_empty(), "{column} {text}");
            assert!(Metric::ALL.iter().all(|metric| read.only(*metric).is_none()), "{column} {text}");
        }
    }
}

#[test]
fn an_unreadable_cell_is_absent_counted_and_the_first_is_named() {
    for (column, text) in [
        ("temperature.gpu", "warm"),
        ("temperature.gpu", "4294967296"),
        ("power.draw [W]", "3000000 W"),
        ("power.draw [W]", "-1.00 W"),
        ("power.draw [W]", "688.12 V"),
        ("power.draw [V]", "688.12"),
        ("memory.used [MiB]", "99999999999999999999 MiB"),
        ("power.draw [W]", "1.2.3 W"),
        ("power.draw [W]", ". W"),
        ("power.draw [W]", "1e3"),
        ("pstate", "P16"),
        ("remapped_rows.pending", "Maybe"),
        ("ecc.errors.corrected.volatile.total", "1.5"),
        ("clocks_event_reasons.active", "4"),
        ("clocks_event_reasons.active", "0xffffffffffffffff"),
        ("clocks_event_reasons.active", "0x+4"),
        ("clocks_event_reasons.sw_power_cap", "Perhaps"),
        ("index", "first"),
        ("utilization.gpu [%]", "9 7 %"),
    ] {
        let name = column.split(' ').next().unwrap();
        let read = read(&format!(
            "timestamp, uuid, {column}\n2026/03/02 09:00:00, GPU-a, {text}\n2026/03/02 09:00:01, GPU-a, {text}\n"
        ));
        assert_eq!((read.counts.rows, read.lost(LostReason::UnreadableCell)), (2, 2), "{column} {text}");
        assert_eq!(read.detail(LostReason::UnreadableCell), format!("log.csv:2 {name} \"{text}\""));
        assert!(Metric::ALL.iter().all(|metric| read.only(*metric).is_none()), "{column} {text}");
    }
}

#[test]
fn reasons_in_words_make_the_mask_and_a_mask_column_wins() {
    let words = |cells: &str| {
        let read = read(&format!(
            "timestamp, clocks_throttle_reasons.gpu_idle, clocks_throttle_reasons.applications_clocks_setting, \
             clocks_event_reasons.sw_power_cap, clocks_event_reasons.hw_slowdown, clocks_event_reasons.sync_boost, \
             clocks_event_reasons.sw_thermal_slowdown, clocks_event_reasons.hw_thermal_slowdown, \
             clocks_event_reasons.hw_power_brake_slowdown\n2026/03/02 09:00:00, {cells}\n"
        ));
        read.only(Metric::ClocksEventReasons)
    };
    for bit in 0..8 {
        let cells: Vec<&str> = (0..8).map(|i| if i == bit { "Active" } else { "Not Active" }).collect();
        assert_eq!(words(&cells.join(", ")), Some(1 << bit));
    }
    assert_eq!(words(&["Not Active"; 8].join(", ")), Some(0));
    assert_eq!(words(&["[N/A]"; 8].join(", ")), None);
    let both = |mask: &str| {
        cell("clocks_event_reasons.sw_power_cap, clocks_event_reasons.active", &format!("Active, {mask}"))
            .only(Metric::ClocksEventReasons)
    };
    assert_eq!(both("0x0000000000000020"), Some(0x20));
    assert_eq!(both("[N/A]"), Some(0x4));
}

#[test]
fn the_best_of_several_power_columns_counts_and_says_what_it_averages() {
    let kind = |columns: &str, cells: &str| {
        let read = cell(columns, cells);
        (read.only(Metric::PowerDraw), read.batches[0].gpus[0].power_kind)
    };
    assert_eq!(kind("power.draw [W]", "1.00 W"), (Some(1000), PowerKind::Unknown));
    assert_eq!(kind("power.draw.average [W]", "1.00 W"), (Some(1000), PowerKind::AverageOneSecond));
    assert_eq!(
        kind("power.draw [W], power.draw.average [W], power.draw.instant [W]", "1, 2, 3"),
        (Some(3000), PowerKind::Instant)
    );
    assert_eq!(kind("power.draw [W], power.draw.instant [W]", "1, [N/A]"), (Some(1000), PowerKind::Unknown));
    let limit = cell("power.limit [W], enforced.power.limit [W]", "700.00 W, 500.00 W");
    assert_eq!(limit.only(Metric::PowerLimit), Some(500_000));
    let limit = cell("power.limit [W], enforced.power.limit [W]", "700.00 W, [N/A]");
    assert_eq!(limit.only(Metric::PowerLimit), Some(700_000));
}

#[test]
fn old_and_new_names_tell_the_same_metric() {
    for (metric, names, text, want) in [
        (Metric::ClockSm, ["clocks.sm [MHz]", "clocks.current.sm [MHz]"], "1410 MHz", 1410),
        (Metric::ClockMemory, ["clocks.mem [MHz]", "clocks.current.memory [MHz]"], "2619 MHz", 2619),
        (
            Metric::ClocksEventReasons,
            ["clocks_throttle_reasons.active", "clocks_event_reasons.active"],
            "0x0000000000000044",
            0x44,
        ),
        (Metric::PcieLinkGen, ["pcie.link.gen.current", "pcie.link.gen.gpucurrent"], "5", 5),
        (Metric::PcieLinkWidth, ["pcie.link.width.current", "PCIE.LINK.WIDTH.CURRENT"], "16", 16),
        (Metric::EccDbeAggregate, ["ecc.errors.uncorrected.aggregate.total"; 2], "7", 7),
        (Metric::EccSbeVolatile, ["ecc.errors.corrected.volatile.total"; 2], "0", 0),
        (Metric::RowRemapPending, ["remapped_rows.pending"; 2], "Yes", 1),
        (Metric::RowRemapFailed, ["remapped_rows.failure"; 2], "No", 0),
        (Metric::RowRemapCorrected, ["remapped_rows.correctable"; 2], "3", 3),
        (Metric::PerformanceState, ["pstate"; 2], "P8", 8),
    ] {
        for name in names {
            assert_eq!(cell(name, text).only(metric), Some(want), "{name}");
        }
    }
}

#[test]
fn times_are_read_in_the_forms_that_logs_have() {
    for text in [
        "2026/03/02 09:00:00.112",
        "2026-03-02 09:00:00.112",
        "2026-03-02T09:00:00,112",
        "2026-03-02T09:00:00.112Z",
        "2026-03-02T10:00:00.112+01:00",
        "2026-03-02 03:30:00.112 -0530",
        "2026/03/02 09:00:00.1120009",
    ] {
        assert_eq!(timestamp(text, 0), Some(NINE + 112_000), "{text}");
    }
    assert_eq!(timestamp("2026/03/02 09:00:00", 0), Some(NINE));
    assert_eq!(timestamp("2026/03/02 10:00:00", 3600), Some(NINE));
    assert_eq!(timestamp("2026-03-02T09:00:00Z", 3600), Some(NINE));
    assert_eq!(timestamp("1970/01/01 00:00:00.000001", 0), Some(1));
    for text in [
        "",
        "2026/03/02",
        "2026/02/29 00:00:00",
        "2026/13/01 00:00:00",
        "2026/03/02 24:00:00",
        "2026/03/02 09:60:00",
        "2026/03/02 9:00:00",
        "2026/03-02 09:00:00",
        "2026/03/02 09:00:00.",
        "2026/03/02 09:00:00 CET",
        "1969/12/31 23:59:59",
        "2026/03/02 09:00:00.1x",
        "２０２６/03/02 09:00",
    ] {
        assert_eq!(timestamp(text, 0), None, "{text}");
    }
}
