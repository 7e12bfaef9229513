use super::*;

/// Decodes a line of `code` with the given unit, severity and words.
fn decoded(code: i32, text: &str) -> Nvlink5<'_> {
    decode(code, text).expect("a whole line")
}

#[track_caller]
fn check(code: i32, text: &str, layout: Option<Layout>, listed: Action, action: Action) {
    let line = decoded(code, text);
    assert_eq!((line.layout, line.listed, line.action()), (layout, listed, action), "{text}");
}

#[test]
fn worked_examples_of_both_layouts_decode_as_the_reference_says() {
    let down = decoded(149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 07 (0x004505c6 0x00000000 0x0 0x0 0x0 0x0)");
    assert_eq!((down.layout, down.link_down_reason, down.link), (Some(Layout::V1), Some(4), Some(7)));
    assert_eq!((down.unit, down.fatal, down.action()), ("NETIR_LINK_EVT", true, Action::ResetGpu));
    assert_eq!(link_down_meaning(4), "link signal");

    let track = decoded(145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 02 (0x04082907 0x00000004 0x0 0x0 0x0 0x0)");
    assert_eq!((track.layout, track.link_down_reason, track.action()), (Some(Layout::V2), None, Action::Xid154Eval));
}

#[test]
fn link_down_is_left_alone_only_when_software_or_the_host_did_it() {
    for (reason, listed) in [(0, Action::ResetGpu), (33, Action::ResetGpu), (38, Action::Ignore), (40, Action::Ignore)]
    {
        let v1 = format!("NETIR_LINK_EVT Nonfatal XC0 i0 Link 01 (0x{:08x} 0x00000000)", reason << 20 | 14 << 5 | 6);
        check(149, &v1, Some(Layout::V1), listed, listed);
        let v2 = format!("NETIR_LINK_DOWN Nonfatal XC0 i0 Link 01 (0x{:08x} 0x00000000)", reason << 20 | 0x11);
        check(149, &v2, Some(Layout::V2), listed, listed);
    }
}

#[test]
fn receive_pipe_resets_only_when_the_driver_promoted_the_error() {
    for (intrinfo, layout, listed) in [
        (6 << 5 | 2, Layout::V1, Action::Ignore),
        (1 << 10 | 6 << 5 | 2, Layout::V1, Action::ResetGpu),
        (6, Layout::V2, Action::Ignore),
        (1 << 7 | 6, Layout::V2, Action::ResetGpu),
    ] {
        let text = format!("RLW_RXPIPE Nonfatal XC0 i0 Link 04 (0x{intrinfo:08x} 0x00000002 0x0)");
        check(145, &text, Some(layout), listed, listed);
    }
}

#[test]
fn worse_of_printed_severity_and_table_holds() {
    let table_worse = "RLW_REMAP Nonfatal XC1 i0 Link 03 (0x00000082 0x00000080 0x0)";
    check(145, table_worse, Some(Layout::V1), Action::ResetGpu, Action::ResetGpu);
    let print_worse = "RLW_REMAP Fatal XC1 i0 Link 03 (0x00000082 0x00000100 0x0)";
    check(145, print_worse, Some(Layout::V1), Action::Ignore, Action::ResetGpu);
}

#[test]
fn status_or_high_bits_outside_the_table_are_unclassified() {
    check(
        147,
        "TREX Nonfatal XC0 i0 Link 00 (0x0000000e 0x00000002)",
        None,
        Action::Unclassified,
        Action::Unclassified,
    );
    check(147, "TREX Fatal XC0 i0 Link 00 (0x0010000e 0x00000001)", None, Action::Unclassified, Action::Unclassified);
}

#[test]
fn units_with_slash_space_and_digits_decode() {
    let text = "TLW_RX/TLW_RX_PIPE1 Fatal XC0 i0 Link 00 (0x0000000b 0x00000004 0x0)";
    check(146, text, Some(Layout::V2), Action::ResetGpu, Action::ResetGpu);
    let degraded = decoded(150, "MSE degraded Fatal XC0 i0 Link -1 (0x00000000 0xffffffff 0x0)");
    assert_eq!((degraded.unit, degraded.link, degraded.action()), ("MSE degraded", Some(-1), Action::ResetGpu));
}

#[test]
fn no_words_fit_two_rows_with_different_actions() {
    for intrinfo in 0..=0x7ff_u32 {
        for row in &ROWS {
            let Some(layout) = row.layout(intrinfo) else { continue };
            for status in (0..32).map(|bit| 1 << bit).chain([0, 3, 5, 7, u32::MAX]) {
                let Some(action) = row.action(layout, intrinfo, status) else { continue };
                let first = fit(row.code, intrinfo, status).expect("this row fits");
                assert_eq!(first.2, action, "xid {} intrinfo {intrinfo:#x} status {status:#x}", row.code);
            }
        }
    }
}

#[test]
fn cut_lines_and_other_codes_do_not_decode() {
    for cut in
        ["NVLPW_CTRL Fatal XC0 i0 Link 05", "NETIR Fatal XC0 i0 Link -1 (0x000fe406", "NETIR", "", "x Fatal (0x1 zz)"]
    {
        assert_eq!(decode(149, cut), None, "{cut}");
    }
    assert_eq!(printed_fatal("NVLPW_CTRL Fatal XC0 i0 Link 05"), Some(true));
    assert_eq!(decode(143, "TREX Nonfatal XC0 i0 Link 00 (0x0000000e 0x00000001)"), None);
}
