//! The shared bank of real lines, which is kept outside the repository since they are other people's.

use std::path::PathBuf;

use super::*;

#[test]
fn every_line_of_the_shared_bank_decodes_as_its_answer_says() {
    let shared = std::env::var_os("GPUFLEET_SHARED")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let Ok(bank) = std::fs::read_to_string(shared.join("cases/xid-lines.tsv")) else {
        eprintln!("skipped: ../shared/cases is missing");
        return;
    };
    let mut wrong = Vec::new();
    for row in bank.lines().skip(1) {
        let cells: Vec<&str> = row.split('\t').collect();
        let &[id, line, kind, code, pci, pid, process] = &cells[..] else { panic!("seven cells: {row}") };
        let found = strip(&line.replace("\\n", "\n")).event().map(|event| {
            let kind = serde_json::to_string(&event.kind).unwrap().trim_matches('"').to_owned();
            let code = event.code.map(|code| code.to_string()).unwrap_or_default();
            let pid = event.pid.map(|pid| pid.to_string()).unwrap_or_default();
            [kind, code, event.pci.unwrap_or_default(), pid, event.process.unwrap_or_default()]
        });
        let pci = pci.split('.').next().unwrap_or_default();
        let expected = (kind != "other" && kind != "none").then(|| [kind, code, pci, pid, process].map(str::to_owned));
        if found != expected {
            wrong.push(format!("{id}: {found:?}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
