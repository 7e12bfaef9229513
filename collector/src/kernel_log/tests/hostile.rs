//! Mutations of every kind of line: outside data never panics.

use super::*;
use gpufleet_schemas::catalogue::advice;

const SEEDS: [&str; 14] = [
    XID_79,
    "4,812,12500000,-,caller=T1;NVRM: Xid (PCI:0000:2a:00 GPU-I:09 GPU-CI:01): 13, pid=1, name=x y, Gr\\x0aph",
    "[Tue Mar  5 06:07:08 2024] NVRM: Xid (0007:00): 8, Channel 00000002",
    "kern  :err   : 2024-03-05T07:07:08,000000+01:00 nvidia-nvswitch2: SXid (PCI:0001:c4:00.0): 24007, Fatal, Link 09",
    "<3>1 2024-03-05T06:07:08Z node-a kernel - - [a b=\"]\\\"\"][c] NVRM: Xid (PCI:0000:2a:00): 154, changed to 0x4",
    "{\"MESSAGE\":\"NVRM: Xid (PCI:0000:2a:00): 45, pid=1\",\"_TRANSPORT\":\"kernel\",\"__REALTIME_TIMESTAMP\":\"17\"}",
    "Mar  5 06:07:08 node-a kernel: [   12.5] NVRM: GPU 0000:4b:00.0: GPU has fallen off the bus.",
    "Feb 29 06:07:08.123456 node-é watcher[1]: NVRM: Xid (PCI:0000:2a:00): 45",
    "[   12.5 <  0.1>] [ T12] NVRM: The NVIDIA GPU 0000:4b:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\nNVRM: fallen off the bus",
    "NVRM: Xid (PCI:0009:01:00): 145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x00000000)",
    "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Nonfatal XC0 i0 Link -1 (0x026505c6 0x00000000)",
    "1709618828.000000 node-a kernel: [Mar05 06:07] [  +0.000007] x",
    "Tue 2024-03-05 06:07:08 CET node-a kernel: MESSAGE=x",
    "\u{feff}2024-03-05 06:07:08 \\x0\\xzz\\xff <191>é",
];

/// Numbers that look random and are the same in every run (Knuth's MMIX constants).
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*state >> 33).unwrap()
}

fn mutate(bytes: &mut Vec<u8>, state: &mut u64) {
    for _ in 0..=next(state) % 4 {
        let at = next(state) % (bytes.len() + 1);
        let other = SEEDS[next(state) % SEEDS.len()].as_bytes();
        match next(state) % 6 {
            0 if at < bytes.len() => bytes[at] = u8::try_from(next(state) % 256).unwrap(),
            1 if at < bytes.len() => drop(bytes.remove(at)),
            2 => bytes.insert(at, b"[]()<>:;,.=-+'\"`\\ \n\0{}0x9"[next(state) % 25]),
            3 => bytes.truncate(at),
            4 => bytes.extend_from_slice(&other[next(state) % other.len()..]),
            _ => drop(bytes.splice(at..at, other[..next(state) % other.len()].iter().copied())),
        }
    }
}

#[test]
fn no_mutation_of_any_line_panics() {
    let mut state = 42;
    let mut log = Vec::new();
    let mut events = 0;
    for case in 0..200_000 {
        let mut bytes = SEEDS[case % SEEDS.len()].as_bytes().to_vec();
        mutate(&mut bytes, &mut state);
        let text = String::from_utf8_lossy(&bytes);
        if let Some(found) = strip(&text).event() {
            let advice = advice(found.kind, found.code, &found.message);
            assert!(!advice.ladder.is_empty());
            events += 1;
        }
        log.extend_from_slice(&bytes);
        log.push(b'\n');
        if log.len() > 1 << 16 {
            let _either = looks_like_kernel_log(&String::from_utf8_lossy(&log));
            run_bytes(&log, if case % 2 == 0 { clock() } else { Clock { year: i32::MAX, ..Clock::default() } });
            log.clear();
        }
    }
    assert!(events > 20_000, "the mutations must still reach the parsers: {events}");
}
