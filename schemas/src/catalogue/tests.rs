use super::*;

#[track_caller]
fn check(kind: EventKind, code: i32, message: &str, severity: Severity, ladder: &[&str]) {
    let advice = advice(kind, Some(code), message);
    assert_eq!(
        (advice.severity, advice.ladder.as_slice()),
        (severity, &ladder.iter().map(ToString::to_string).collect::<Vec<_>>()[..]),
        "{kind:?} {code} {message}"
    );
    assert!(!advice.name.is_empty() && !advice.source.is_empty());
}

#[test]
fn every_row_of_both_tables_is_read() {
    for (table, first) in [(XID_TABLE, 1), (SXID_TABLE, 10001)] {
        let codes: Vec<i32> =
            table.lines().skip(2).map(|line| line.split('\t').next().unwrap().parse().unwrap()).collect();
        assert_eq!(codes[0], first);
        assert!(codes.is_sorted_by(|a, b| a < b), "sorted, without repeats");
        assert!(codes.iter().all(|code| if first == 1 { xid(*code).is_some() } else { sxid(*code).is_some() }));
    }
    assert!((1..=176).all(|code| xid(code).is_some()));
}

#[test]
fn severities_follow_the_detection_reference() {
    let all = |codes: &[i32], severity| {
        for code in codes {
            assert_eq!(xid(*code).unwrap().severity, severity, "{code}");
        }
    };
    all(&[48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 158], Severity::Critical);
    all(&[74, 92, 94, 156], Severity::Major);
    all(&[13, 31, 43, 45, 68, 69], Severity::Warning);
    all(&[63, 154, 160, 161], Severity::Info);
}

#[test]
fn ladder_begins_with_the_immediate_action() {
    check(EventKind::Xid, 79, "GPU has fallen off the bus.", Severity::Critical, &["RESTART_BM", "CONTACT_SUPPORT"]);
    check(EventKind::Xid, 13, "Graphics Exception", Severity::Warning, &["RESTART_APP", "WORKFLOW_XID_13"]);
    check(EventKind::Xid, 48, "", Severity::Critical, &["WORKFLOW_XID_48"]);
    check(EventKind::Xid, 162, "", Severity::Info, &["IGNORE"]);
    check(EventKind::Xid, 169, "", Severity::Critical, &["CONTACT_SUPPORT"]);
    assert_eq!(advice(EventKind::FellOff, Some(0), ""), advice(EventKind::Xid, Some(79), ""));
}

#[test]
fn unknown_code_is_major_and_kept() {
    for (kind, code) in [(EventKind::Xid, 9999), (EventKind::Xid, -1), (EventKind::Sxid, 31337)] {
        check(kind, code, "something new", Severity::Major, &["CONTACT_SUPPORT"]);
        assert_eq!(advice(kind, Some(code), "").name, "unclassified");
    }
    check(EventKind::Sxid, 31337, "Fatal, Link 03 something new", Severity::Critical, &["CONTACT_SUPPORT"]);
}

#[test]
fn recovery_action_is_read_from_the_number_it_changes_to() {
    let text = |from: u32, to: u32| format!("GPU recovery action changed from {from:#x} (any) to {to:#x} (words)");
    for (to, ladder) in [
        (0, &["NONE"][..]),
        (1, &["RESET_GPU"]),
        (2, &["RESTART_BM"]),
        (3, &["DRAIN_P2P"]),
        (4, &["DRAIN", "RESET_GPU"]),
        (5, &["RECOVER_IMEX_DOMAIN"]),
        (6, &["RESET_GPU"]),
        (7, &["RESTART_BM"]),
        (0x2a, &["CONTACT_SUPPORT"]),
    ] {
        check(EventKind::Xid, 154, &text(1, to), Severity::Info, ladder);
    }
    check(EventKind::Xid, 154, "GPU recovery action changed from 0x0 (None)", Severity::Info, &["XID_154"]);
    assert_eq!(recovery_action(&text(4, 1)), Some(1));
}

#[test]
fn link_errors_take_the_decoded_action() {
    let trex = "TREX Nonfatal XC0 i0 Link 00 (0x0000000e 0x00000001 0x0)";
    check(EventKind::Xid, 147, trex, Severity::Info, &["IGNORE"]);
    let remap = "RLW_REMAP Nonfatal XC1 i0 Link 09 (0x00000082 0x00000004 0x0)";
    check(EventKind::Xid, 145, remap, Severity::Major, &["XID_154_EVAL", "RESTART_APP"]);
    let saw = "SAW_MVB Nonfatal XC0 i0 Link 00 (0x00000001 0x00000010 0x0)";
    check(EventKind::Xid, 144, saw, Severity::Critical, &["RESET_GPU"]);
    check(EventKind::Xid, 148, "NVLPW_CTRL Fatal XC0 i0 Link 05", Severity::Critical, &["CONTACT_SUPPORT"]);
    check(EventKind::Xid, 148, "NVLPW_CTRL", Severity::Major, &["CONTACT_SUPPORT"]);
}

#[test]
fn switch_errors_follow_the_guide_unless_the_message_says_worse() {
    check(
        EventKind::Sxid,
        20034,
        "Fatal, Link 11 LTSSM Fault Up",
        Severity::Critical,
        &["RESET_PORT_GPUS", "RESTART_VM"],
    );
    check(EventKind::Sxid, 22013, "Non-fatal, Link 11 Minion", Severity::Info, &["IGNORE"]);
    check(EventKind::Sxid, 12028, "Non-fatal, Link 32 egress", Severity::Major, &["RESTART_VM"]);
    check(EventKind::Sxid, 23009, "", Severity::Critical, &["RESET_ALL_GPUS_AND_SWITCHES", "RESTART_NODE"]);
    check(EventKind::Sxid, 20009, "Fatal, Link 11 RX", Severity::Critical, &["CONTACT_SUPPORT"]);
    check(EventKind::Sxid, 28002, "Non-fatal, Link 20", Severity::Warning, &["CONTACT_SUPPORT"]);
    check(EventKind::Sxid, 26006, "SOE HALTED", Severity::Major, &["CONTACT_SUPPORT"]);
}
