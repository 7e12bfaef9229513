//! Faults and look-alikes, and when and where they happen.

use gpufleet_schemas::instant::SECOND;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::GPUS_PER_HOST;
use super::ledger::Decoy;

const MINUTE: i64 = 60 * SECOND;

/// Something that happens to a GPU. Instants are microseconds after the start of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Airflow is blocked; whether the GPU throttles is up to its physics.
    BlockedAirflow {
        at: i64,
        span: i64,
    },
    /// An uncorrectable memory error, with its Xid 48.
    Uncorrectable,
    /// Corrected errors, one every 45 s.
    CorrectableBurst {
        at: i64,
        errors: u32,
    },
    /// Xid 79, and the GPU is gone.
    OffTheBus,
    /// An application's Xid.
    ApplicationXid {
        code: u32,
    },
    // Look-alikes.
    PowerCap,
    HotButUnthrottled,
    OneCorrectable,
    PstateChange {
        at: i64,
    },
    QuotedXid,
    InformationXid,
    DriverReload,
}

impl Fault {
    /// What the kernel log gets: priority (facility and level) and text.
    pub(super) fn kernel_lines(&self, pci: &str) -> Vec<(u32, String)> {
        // The driver prints four digits of the domain.
        let pci = pci.get(4..).unwrap_or(pci);
        let kernel = |text: String| (4, text);
        match self {
            Fault::Uncorrectable => vec![kernel(format!(
                "NVRM: Xid (PCI:{pci}): 48, pid=3121, name=python3, DBE (double bit error) ECC Error (bank 0xc, loc 0x2a)"
            ))],
            Fault::OffTheBus => vec![
                kernel(format!(
                    "NVRM: Xid (PCI:{pci}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
                )),
                kernel(format!("NVRM: GPU {pci}.0: GPU has fallen off the bus.")),
            ],
            Fault::ApplicationXid { code } => vec![kernel(format!(
                "NVRM: Xid (PCI:{pci}): {code}, pid=3121, name=python3, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 0): Out Of Range Address"
            ))],
            Fault::InformationXid => vec![kernel(format!(
                "NVRM: Xid (PCI:{pci}): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row (0x00000000001d8a3c) marked for remapping."
            ))],
            // Facility user (1), level notice: somebody's script echoes an Xid into the kernel log.
            Fault::QuotedXid => {
                vec![(13, format!("healthcheck: last seen: NVRM: Xid (PCI:{pci}): 79, GPU has fallen off the bus."))]
            }
            _ => Vec::new(),
        }
    }

    /// The kind of incident that the kernel-log line alone owes.
    pub(super) fn labels_event(&self) -> Option<&'static str> {
        matches!(self, Fault::Uncorrectable | Fault::OffTheBus | Fault::ApplicationXid { .. }).then_some("xid")
    }

    fn decoy(&self) -> Option<&'static str> {
        match self {
            Fault::PowerCap => Some("power cap (0x4) for the whole run"),
            Fault::HotButUnthrottled => Some("hot, at full clock"),
            Fault::OneCorrectable => Some("a single corrected error"),
            Fault::PstateChange { .. } => Some("HW slowdown (0x8) at a P-state change"),
            Fault::QuotedXid => Some("a user-space line that quotes Xid 79"),
            Fault::InformationXid => Some("Xid 63, which is information"),
            Fault::DriverReload => Some("driver reload that zeroes the counters"),
            _ => None,
        }
    }
}

/// What happens when, to which GPU of the fleet.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Ascending by time.
    entries: Vec<(i64, usize, Fault)>,
}

impl Plan {
    /// Draws faults and look-alikes for a run of `span` microseconds: a set of each per 64 GPUs, at least one.
    pub fn draw(seed: u64, gpus: usize, span: i64) -> Plan {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x706c_616e);
        let mut order: Vec<usize> = (0..gpus).collect();
        order.shuffle(&mut rng);
        let mut next = order.into_iter().cycle();
        let mut gpu = || next.next().unwrap_or(0);
        let mut entries = Vec::new();
        // Times scale with the run, so that what must resolve has time to.
        let part = |rng: &mut ChaCha8Rng, from: f64, to: f64| {
            (span as f64 * rng.random_range(from..to)) as i64 / SECOND * SECOND
        };
        for _ in 0..(gpus / 64).clamp(1, 16) {
            let at = part(&mut rng, 0.15, 0.30);
            entries.push((at, gpu(), Fault::BlockedAirflow { at, span: (span / 6).max(4 * MINUTE) }));
            let at = part(&mut rng, 0.15, 0.90);
            entries.push((at, gpu(), Fault::Uncorrectable));
            let at = part(&mut rng, 0.15, 0.50);
            entries.push((at, gpu(), Fault::CorrectableBurst { at, errors: rng.random_range(12..24) }));
            entries.push((part(&mut rng, 0.15, 0.95), gpu(), Fault::OffTheBus));
            let (at, code, place) = (part(&mut rng, 0.15, 0.60), if rng.random() { 13 } else { 31 }, gpu());
            for repeat in 0..3 {
                entries.push((at + repeat * 40 * SECOND, place, Fault::ApplicationXid { code }));
            }
            entries.push((0, gpu(), Fault::PowerCap));
            entries.push((0, gpu(), Fault::HotButUnthrottled));
            let quiet = gpu();
            entries.push((part(&mut rng, 0.15, 0.90), quiet, Fault::OneCorrectable));
            let at = part(&mut rng, 0.15, 0.90);
            entries.push((at, quiet, Fault::PstateChange { at }));
            entries.push((part(&mut rng, 0.15, 0.90), quiet, Fault::QuotedXid));
            entries.push((part(&mut rng, 0.15, 0.90), quiet, Fault::InformationXid));
        }
        // Early, so that it resolves nothing that is planted.
        let host = rng.random_range(0..gpus.div_ceil(GPUS_PER_HOST).max(1));
        entries.push((part(&mut rng, 0.05, 0.12), host * GPUS_PER_HOST, Fault::DriverReload));
        entries.sort_by_key(|(at, gpu, _)| (*at, *gpu));
        Plan { entries }
    }

    /// What begins in `[from, until)`.
    pub fn due(&self, from: i64, until: i64) -> impl Iterator<Item = (i64, usize, Fault)> + '_ {
        let start = self.entries.partition_point(|(at, ..)| *at < from);
        self.entries[start..].iter().take_while(move |(at, ..)| *at < until).cloned()
    }

    pub(super) fn decoys(&self, name: &dyn Fn(usize) -> (String, String)) -> Vec<Decoy> {
        let decoy = |(_, gpu, fault): &(i64, usize, Fault)| {
            let what = fault.decoy()?;
            let (host, gpu) = name(*gpu);
            Some(Decoy { what, host, gpu })
        };
        self.entries.iter().filter_map(decoy).collect()
    }
}
