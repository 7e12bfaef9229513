mod bank;
mod hostile;

use super::*;

const XID_79: &str = "NVRM: Xid (PCI:0000:5e:00): 79, pid=4242, name=trainer, GPU has fallen off the bus.";
const SECOND: i64 = 1_000_000;
/// 2024-03-05 06:07:08 UTC.
const WALL: i64 = 1_709_618_828 * SECOND;

fn event(text: &str) -> Event {
    parse_message(text).unwrap_or_else(|| panic!("no event: {text}"))
}

fn run(log: &str, clock: Clock) -> (Vec<Decoded>, Summary) {
    run_bytes(log.as_bytes(), clock)
}

fn run_bytes(log: &[u8], clock: Clock) -> (Vec<Decoded>, Summary) {
    let mut found = Vec::new();
    let summary = read(log, &clock, |decoded| found.push(decoded)).unwrap();
    assert_eq!(summary.events, found.len() as u64);
    (found, summary)
}

fn clock() -> Clock {
    Clock { tz_offset_seconds: 3600, year: 2024, ends_at_micros: Some(WALL), boot_at_micros: None }
}

// Messages.

#[test]
fn xid_gives_code_address_process_and_text() {
    let found = event("NVRM: Xid (PCI:0000:5E:00): 31, pid=77, name=a.out, Ch 00000010, intr 0. MMU Fault\n");
    assert_eq!((found.kind, found.code, found.pci.as_deref()), (EventKind::Xid, Some(31), Some("00000000:5e:00")));
    assert_eq!((found.pid, found.process.as_deref(), found.mig), (Some(77), Some("a.out"), None));
    assert_eq!(found.message, "Ch 00000010, intr 0. MMU Fault");
}

#[test]
fn every_spelling_of_an_address_is_one_address() {
    for (text, expected) in [
        ("PCI:0000:9b:00", Some("00000000:9b:00")),
        ("00000000:9B:00.0", Some("00000000:9b:00")),
        ("PCI:0011:01:1f.7", Some("00000011:01:1f")),
        ("9b:00.0", Some("00000000:9b:00")),
        ("009b:00", Some("00000000:9b:00")),
        ("01ff:00", None),
        ("PCI:...", None),
        ("0000:9b:00:00", None),
        ("+000:9b:00", None),
        ("", None),
    ] {
        assert_eq!(pci_address(text).as_deref(), expected, "{text}");
    }
    assert_eq!(event("NVRM: Xid (PCI:...): 94, Contained").pci, None);
    assert_eq!(event("NVRM: Xid (0007:00): 8, Channel 00000002").pci.as_deref(), Some("00000000:07:00"));
}

#[test]
fn mig_slice_is_read_where_it_is_named() {
    let mig = |text: &str| event(text).mig;
    let whole = Some(Mig { gpu_instance: 9, compute_instance: Some(1) });
    assert_eq!(mig("NVRM: Xid (PCI:0000:2a:00 GPU-I:09 GPU-CI:01): 13, pid=1, name=x, Graphics"), whole);
    let half = Some(Mig { gpu_instance: 3, compute_instance: None });
    assert_eq!(mig("NVRM: Xid (PCI:0000:2a:00 GPU-I:03): 94, Contained"), half);
    assert_eq!(mig("NVRM: Xid (PCI:0000:2a:00): 94, Contained"), None);
}

#[test]
fn what_the_driver_does_not_know_is_none() {
    for unknown in ["'<unknown>'", "<unknown>", "'`<unknown>`'", "'N/A'", "`<unknown>`"] {
        let found = event(&format!("NVRM: Xid (PCI:0000:2a:00): 74, pid={unknown}, name={unknown}, NVLink: fatal"));
        assert_eq!((found.pid, found.process, found.message.as_str()), (None, None, "NVLink: fatal"), "{unknown}");
    }
}

#[test]
fn process_names_may_hold_nearly_anything() {
    for name in ["my tool", "nvc:[driver]", "ray::Actor", "a,b", "it's", "x (deleted)", "xid_tool", "run.7"] {
        let found = event(&format!("NVRM: Xid (PCI:0000:2a:00): 45, pid=5, name={name}, Ch 00000001"));
        assert_eq!((found.process.as_deref(), found.message.as_str()), (Some(name), "Ch 00000001"));
    }
    let named_only = event("NVRM: Xid (PCI:0000:2a:00): 109, name=game.exe, channel 0x1");
    assert_eq!((named_only.pid, named_only.process.as_deref()), (None, Some("game.exe")));
    let cut = event("NVRM: Xid (PCI:0000:2a:00): 45, pid=5, name=tra");
    assert_eq!((cut.process.as_deref(), cut.message.as_str()), (Some("tra"), ""));
}

#[test]
fn cause_named_by_a_secondary_xid_stays_in_the_message() {
    let found = event("NVRM: Xid (PCI:0000:2a:00): 45, pid=5, name=t, Ch 00000001 caused by previous Xid 48");
    assert_eq!((found.code, found.message.as_str()), (Some(45), "Ch 00000001 caused by previous Xid 48"));
}

#[test]
fn malformed_and_quoted_reports_are_no_events() {
    for text in [
        "NVRM: Xid (PCI:0000:2a:00): seventy, pid=1",
        "NVRM: Xid (PCI:0000:2a:00): 79x, pid=1",
        "NVRM: Xid (PCI:0000:2a:00): 99999999999, pid=1",
        "NVRM: Xid (PCI:0000:2a:00) 79",
        "NVRM: Xid (PCI:0000:2a:00",
        "NVRM: Xid PCI:0000:2a:00: 79",
        "NVRM: Xid : 79",
        "NVRM: Xid 79",
        "Xid (PCI:0000:2a:00): 79, GPU has fallen off the bus",
        "alert: NVRM: Xid (PCI:0000:2a:00): 79, GPU has fallen off the bus",
        "NVRM: GPU at PCI:0000:2a:00: GPU-00000000-0000-0000-0000-000000000000",
        "NVRM: GPU 0000:2a:00.0: RmInitAdapter failed! (0x22:0x56:0)",
        "dhcp: offer xid=0x1234",
        "",
    ] {
        assert_eq!(parse_message(text), None, "{text}");
    }
}

#[test]
fn only_the_first_line_of_a_switch_error_is_an_event() {
    let found = event("nvidia-nvswitch2: SXid (PCI:0001:c4:00.0): 24007, Fatal, Link 09 sourcetrack timeout");
    assert_eq!((found.kind, found.code, found.pci.as_deref()), (EventKind::Sxid, Some(24007), Some("00000001:c4:00")));
    assert_eq!(found.message, "Fatal, Link 09 sourcetrack timeout");
    assert!(parse_message("nvidia-nvswitch0: SXid (PCI:0001:c4:00.0): 26006, SOE HALTED").is_some());
    for rest in ["Severity 1 Engine instance 09", "Data {0x00000001, 0x2}", "Sev", "Dat", "", "SOE HALT data[1] = 0x0"]
    {
        assert_eq!(parse_message(&format!("nvidia-nvswitch2: SXid (PCI:0001:c4:00.0): 24007, {rest}")), None, "{rest}");
    }
    assert_eq!(parse_message("nvidia-nvswitch2: SXid (none): error"), None);
    assert_eq!(parse_message("nvidia-nvswitch: SXid (PCI:0001:c4:00.0): 1, Fatal"), None);
}

#[test]
fn fallen_off_is_read_in_its_plain_and_its_three_line_form() {
    for text in [
        "NVRM: GPU 0000:4b:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 4b:00.0: GPU has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:4b:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\nNVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:4b:00.0 (PCI ID: 10de:2330)\n      NVRM: installed in this system has fallen off the bus",
    ] {
        let found = event(text);
        assert_eq!((found.kind, found.code, found.pci.as_deref()), (EventKind::FellOff, None, Some("00000000:4b:00")));
        assert!(found.message.contains("fallen off the bus") && !found.message.contains("NVRM"), "{}", found.message);
    }
    assert_eq!(
        parse_message("NVRM: The NVIDIA GPU 0000:4b:00.0 (PCI ID: 10de:2330) installed in this system has"),
        None
    );
}

#[test]
fn kinds_are_written_as_the_schema_names_them() {
    let names = [EventKind::Xid, EventKind::Sxid, EventKind::FellOff].map(|kind| serde_json::to_string(&kind).unwrap());
    assert_eq!(names, ["\"xid\"", "\"sxid\"", "\"fell_off\""]);
}

// Transports.

#[test]
fn every_transport_gives_message_stamp_and_host() {
    let wall = Some(Stamp::Wall { at_micros: WALL });
    let local = Some(Stamp::Local { local_micros: WALL });
    let short = Some(Stamp::LocalNoYear { month: 3, day: 5, micros_of_day: (6 * 3600 + 7 * 60 + 8) * SECOND });
    let boot = Some(Stamp::Monotonic { micros: 12_500_000 });
    for (prefix, stamp, host) in [
        ("", None, None),
        ("<3>", None, None),
        ("[   12.500000] ", boot, None),
        ("<3>[   12.500000] ", boot, None),
        ("[   12.500000] [ T1234] ", boot, None),
        ("[   12.500000 <    0.000007>] ", boot, None),
        ("[  +0.000007] ", None, None),
        ("[...] ", None, None),
        (
            "[Mar05 06:07] ",
            Some(Stamp::LocalNoYear { month: 3, day: 5, micros_of_day: (6 * 3600 + 7 * 60) * SECOND }),
            None,
        ),
        ("[Tue Mar  5 06:07:08 2024] ", local, None),
        ("kern  :err   : [   12.500000] ", boot, None),
        ("kern  :warn  : [Tue Mar  5 06:07:08 2024] ", local, None),
        ("kern  :err   : 2024-03-05T07:07:08,000000+01:00 ", wall, None),
        ("2024-03-05T06:07:08,000000+00:00 ", wall, None),
        ("4,812,12500000,-;", boot, None),
        ("3,812,12500000,c,caller=T77,more;", boot, None),
        ("Mar  5 06:07:08 node-a kernel: ", short, Some("node-a")),
        ("Mar  5 06:07:08 node-a kernel: [   99.000000] ", short, Some("node-a")),
        ("Mar 05 06:07:08.000000 kernel: ", short, None),
        ("Mar  5 06:07:08 ", short, None),
        ("Mar  5 06:07:08 node-a ", short, Some("node-a")),
        ("2024-03-05T06:07:08+0000 node-a kernel: ", wall, Some("node-a")),
        ("2024-03-05T06:07:08.000000-00:00 node-a kernel: [   12.500000] ", wall, Some("node-a")),
        ("2024-03-05 06:07:08 node-a kernel: ", local, Some("node-a")),
        ("[   12.500000] node-a kernel: ", boot, Some("node-a")),
        ("Tue 2024-03-05 06:07:08 UTC node-a kernel: ", wall, Some("node-a")),
        ("Tue 2024-03-05 06:07:08 CET node-a kernel: ", local, Some("node-a")),
        ("1709618828.000000 node-a kernel: ", wall, Some("node-a")),
        ("kernel: [   12.500000] ", boot, None),
        ("kernel: ", None, None),
        ("MESSAGE=", None, None),
        ("<3>Mar  5 06:07:08 node-a kernel: ", short, Some("node-a")),
        ("<3>1 2024-03-05T06:07:08.000000Z node-a kernel - - - ", wall, Some("node-a")),
        ("<3>1 2024-03-05T06:07:08Z node-a kernel - - [a b=\"]\\\"\"][c] \u{feff}", wall, Some("node-a")),
    ] {
        let line = format!("{prefix}{XID_79}");
        let record = strip(&line);
        assert_eq!((record.text.as_ref(), record.stamp, record.host.as_deref()), (XID_79, stamp, host), "{prefix}");
        assert!(record.event().is_some(), "{prefix}");
    }
}

#[test]
fn kmsg_record_gives_its_sequence_and_loses_its_keys_and_escapes() {
    let record =
        strip("4,812,12500000,-;NVRM: name=caf\\xc3\\xa9 \\x5cx\\x0a\n SUBSYSTEM=pci\n DEVICE=+pci:0000:5e:00.0");
    assert_eq!((record.text.as_ref(), record.sequence), ("NVRM: name=café \\x\n", Some(812)));
    let lost = "4,9,1,-;NVRM: The NVIDIA GPU 0000:4b:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system has\\x0aNVRM: fallen off the bus and is not responding to commands.";
    assert_eq!(strip(lost).event().unwrap().kind, EventKind::FellOff);
}

#[test]
fn user_space_that_quotes_a_report_is_no_event() {
    let quotes = [
        format!("12,812,12500000,-;{XID_79}"),
        format!("<14>{XID_79}"),
        format!("<13>Mar  5 06:07:08 node-a kernel: {XID_79}"),
        format!("user  :notice: [   12.500000] {XID_79}"),
        format!("Mar  5 06:07:08 node-a watcher[12]: {XID_79}"),
        format!("Mar  5 06:07:08 watcher: {XID_79}"),
        format!("2024-03-05T06:07:08+0000 node-a watcher[12]: {XID_79}"),
        format!("[   12.500000] watcher[12]: {XID_79}"),
        format!("[watcher] [CRITICAL] seen: {XID_79}"),
        format!("<14>1 2024-03-05T06:07:08Z node-a watcher 12 - - {XID_79}"),
        format!(r#"{{"MESSAGE":"{XID_79}","_TRANSPORT":"stdout"}}"#),
        format!(r#"{{"MESSAGE":"{XID_79}","SYSLOG_IDENTIFIER":"watcher"}}"#),
    ];
    for line in &quotes {
        assert_eq!(strip(line).event(), None, "{line}");
    }
    let (found, summary) = run(&quotes.join("\n"), clock());
    assert_eq!((found.len(), summary.quoted), (0, quotes.len() as u64));
}

#[test]
fn lines_under_a_program_s_own_line_are_that_program_s() {
    let log = format!(
        "Mar  5 06:07:08 node-a watcher[12]: report:\n      {XID_79}\nMar  5 06:07:09 node-a kernel: {XID_79}\n"
    );
    let (found, summary) = run(&log, clock());
    assert_eq!((found.len(), found[0].line, summary.quoted), (1, 3, 1));
}

#[test]
fn journal_object_gives_everything_it_carries() {
    let line = format!(
        r#"{{"__REALTIME_TIMESTAMP":"{WALL}","_SOURCE_MONOTONIC_TIMESTAMP":"12500000","_TRANSPORT":"kernel","_HOSTNAME":"node-a","_BOOT_ID":"0123abcd","PRIORITY":"3","MESSAGE":"{XID_79}","_X":null}}"#
    );
    let (found, _) = run(&line, clock());
    assert_eq!((found[0].at_micros, found[0].estimated, found[0].raw.as_str()), (WALL, false, line.as_str()));
    assert_eq!((found[0].host.as_deref(), found[0].boot_id.as_deref()), (Some("node-a"), Some("0123abcd")));

    let bytes = serde_json::to_string(XID_79.as_bytes()).unwrap();
    let record = format!(r#"{{"MESSAGE":{bytes},"_SOURCE_MONOTONIC_TIMESTAMP":"12500000"}}"#);
    assert_eq!(
        (strip(&record).text.as_ref(), strip(&record).stamp),
        (XID_79, Some(Stamp::Monotonic { micros: 12_500_000 }))
    );
    for odd in [r#"{"MESSAGE":null}"#, r#"{"MESSAGE":[256]}"#, r#"{"log":"x"}"#, "{", "{}"] {
        assert_eq!(strip(odd).event(), None, "{odd}");
    }
}

// Time.

#[test]
fn local_stamps_use_the_zone_and_a_month_that_goes_back_begins_a_year() {
    let log = format!(
        "Dec 31 23:59:58 n kernel: {XID_79}\nJan  1 00:59:59 n kernel: {XID_79}\nDec 31 23:59:59 n kernel: {XID_79}\nJan  2 00:00:00 n kernel: {XID_79}\n"
    );
    let (found, _) = run(&log, Clock { year: 2023, ..clock() });
    let new_year = 1_704_067_200 * SECOND;
    let expected = [-3602, -1, -3601, 86400 - 3600].map(|seconds| (new_year + seconds * SECOND, false));
    assert_eq!(found.iter().map(|d| (d.at_micros, d.estimated)).collect::<Vec<_>>(), expected);
}

#[test]
fn straggler_at_a_month_s_end_does_not_begin_a_year() {
    let log = format!(
        "Aug  1 00:00:01 n kernel: {XID_79}\nJul 31 23:59:59 n kernel: {XID_79}\nAug  1 00:00:02 n kernel: {XID_79}\n"
    );
    let (found, _) = run(&log, clock());
    assert_eq!(found[1].at_micros, found[0].at_micros - 2 * SECOND);
    assert_eq!(found[2].at_micros, found[0].at_micros + SECOND);
}

#[test]
fn leap_day_of_a_wrong_year_keeps_its_event() {
    let (found, _) = run(&format!("Feb 29 00:00:00 n kernel: {XID_79}\n"), Clock { year: 2023, ..Clock::default() });
    assert_eq!(found[0].at_micros, 1_677_542_400 * SECOND);
}

#[test]
fn stamps_since_a_known_boot_are_exact() {
    let (found, _) = run(&format!("[   12.500000] {XID_79}"), Clock { boot_at_micros: Some(WALL), ..clock() });
    assert_eq!((found[0].at_micros, found[0].estimated), (WALL + 12_500_000, false));
}

#[test]
fn stamps_since_an_unknown_boot_end_where_the_file_ends() {
    let log = format!("[   10.0] first\n[   12.5] {XID_79}\n[   20.0] last\n");
    let (found, _) = run(&log, clock());
    assert_eq!((found[0].at_micros, found[0].estimated), (WALL - 7_500_000, true));
}

#[test]
fn earlier_boot_ends_where_the_next_begins() {
    let log = format!("[  100.0] {XID_79}\n[  101.0] down\n[    0.0] up\n[    5.0] {XID_79}\n[   15.0] last\n");
    let (found, _) = run(&log, clock());
    assert_eq!(found.iter().map(|d| (WALL - d.at_micros) / SECOND).collect::<Vec<_>>(), [16, 10]);
    let (adrift, _) = run(&log, Clock::default());
    assert_eq!(adrift.iter().map(|d| d.at_micros / SECOND).collect::<Vec<_>>(), [-1, 5]);
}

#[test]
fn line_without_a_stamp_takes_the_time_before_it() {
    let (found, _) = run(&format!("2024-03-05T06:00:00Z n kernel: up\n{XID_79}\n"), clock());
    assert_eq!((found[0].at_micros, found[0].estimated), (WALL - 428 * SECOND, true));
    let (alone, _) = run(XID_79, clock());
    assert_eq!((alone[0].at_micros, alone[0].estimated), (WALL, true));
    let (boot, _) = run(&format!("[   10.0] up\n{XID_79}\n[   20.0] last\n"), clock());
    assert_eq!((boot[0].at_micros, boot[0].estimated), (WALL - 10 * SECOND, true));
}

// Files.

#[test]
fn three_lines_of_a_lost_gpu_are_one_event() {
    let parts = [
        "NVRM: The NVIDIA GPU 0000:4b:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ];
    for log in [
        format!(
            "[    9.0] up\n[   10.0] {}\n[   10.0] {}\n[   10.1] usb 1-1: new device\n[   10.2] {}\n",
            parts[0], parts[1], parts[2]
        ),
        format!(
            "[    9.0] up\n[   10.0] {}\n               {}\n               {}\n[   10.2] x\n",
            parts[0], parts[1], parts[2]
        ),
    ] {
        let (found, _) = run(&log, Clock { boot_at_micros: Some(0), ..clock() });
        assert_eq!((found.len(), found[0].event.kind, found[0].line), (1, EventKind::FellOff, 2));
        assert_eq!((found[0].at_micros, found[0].raw.lines().count()), (10 * SECOND, 3));
        assert_eq!(found[0].event.pci.as_deref(), Some("00000000:4b:00"));
    }
    let other = format!("{}\nNVRM: (PCI ID: 10de:1b80) installed in this system is not supported\n", parts[0]);
    assert_eq!(run(&other, clock()).0, []);
    let far = format!("{}\n{}{}\n{}\n", parts[0], "x\n".repeat(20), parts[1], parts[2]);
    assert_eq!(run(&far, clock()).0, []);
}

#[test]
fn bytes_of_any_kind_are_read() {
    let mut log = format!("[1.0] {XID_79}\r\n\0\0\0[2.0] {XID_79}\r\n[3.0] ").into_bytes();
    log.extend_from_slice(b"NVRM: Xid (PCI:0000:5e:00): 13, pid=1, name=\xff\xfe, Graphics\n");
    log.extend(std::iter::repeat_n(b'x', 3 * MAX_LINE_BYTES));
    log.extend_from_slice(format!("\n\u{feff}\n[4.0] {XID_79}").as_bytes());
    let (found, summary) = run_bytes(&log, clock());
    assert_eq!(found.iter().map(|d| d.line).collect::<Vec<_>>(), [1, 2, 3, 6]);
    assert_eq!((summary.lines, summary.cut, summary.not_utf8), (6, 1, 1));
    assert_eq!(found[1].raw, format!("[2.0] {XID_79}"));
    assert_eq!(run_bytes(b"", clock()), (vec![], Summary::default()));
}

#[test]
fn cut_inside_a_character_is_not_bad_text() {
    let long = format!("{}é{}\n[4.0] {XID_79}", "x".repeat(MAX_LINE_BYTES - 1), "y".repeat(9));
    let (found, summary) = run(&long, clock());
    assert_eq!((found.len(), summary.cut, summary.not_utf8), (1, 1, 0));
    let full = format!("{}\n", "x".repeat(MAX_LINE_BYTES));
    assert_eq!(run(&full, clock()).1.cut, 0);
}

#[test]
fn utf16_with_its_mark_is_read_in_either_order() {
    let text = format!("\u{feff}[1.0] {XID_79}\r\n[2.0] naïve\r\n[3.0] {XID_79}");
    let little: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let big: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    for bytes in [little, big] {
        let (found, summary) = run_bytes(&bytes, clock());
        assert_eq!((found.len(), summary.lines, summary.not_utf8), (2, 3, 0));
        assert_eq!(found[1].event, event(XID_79));
    }
    let (_, odd) = run_bytes(&[0xff, 0xfe, 0x00, 0xd8, 0x0a, 0x00, 0x41], clock());
    assert_eq!((odd.lines, odd.not_utf8), (1, 1));
}

#[test]
fn kernel_log_is_told_from_a_table() {
    for log in [
        "[    0.000000] Linux version 6.1\n[    0.000001] Command line: quiet\n",
        "Mar  5 06:07:08 node-a kernel: usb 1-1: new device\nMar  5 06:07:09 node-a sshd[1]: hello\n",
        "6,1,2,-;Linux version\n SUBSYSTEM=x\n6,2,3,-;more\n",
        "{\"MESSAGE\":\"hello\",\"_TRANSPORT\":\"kernel\"}\n",
        "free text\nmore\nNVRM: Xid (PCI:0000:5e:00): 79\n",
        "__CURSOR=s=1\n__REALTIME_TIMESTAMP=1\n",
    ] {
        assert!(looks_like_kernel_log(log), "{log}");
    }
    for other in [
        "timestamp, index, power.draw [W]\n2024/03/05 06:07:08.123, 0, 71.2 W\n2024/03/05 06:07:09.123, 0, 71.3 W\n",
        "2024-03-05 06:07:08,0,71.2\n2024-03-05 06:07:09,0,71.2\n",
        "host,node\n1,2,3\n",
        "",
    ] {
        assert!(!looks_like_kernel_log(other), "{other}");
    }
}
