//! This host, live: NVML on its rate tiers and the kernel log, as one source.
//!
//! One thread reads everything in turn; the child process that keeps a hanging driver away from the agent, and the
//! spool, are not here yet.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpufleet_schemas::instant::SECOND;
use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Tier};
use gpufleet_schemas::record::{EventKind, GpuBatch, Labels, Lost, LostReason, Origin, Series, Telemetry, XidEvent};

use super::kernel_log_file::kernel_event_to_record;
use super::nvml::{Devices, Health, Readings};
use super::{Source, SourceError};
use crate::kernel_log;

const FAST_PERIOD: Duration = Duration::from_millis(100);
const TICKS_PER_FLUSH: usize = 5;
const SLOW_EVERY: u64 = 10;
const HEALTH_EVERY: u64 = 100;
/// `O_NONBLOCK` on Linux (asm-generic/fcntl.h).
const NONBLOCK: i32 = 0o4000;
/// The kernel refuses a read into less than a record; records have at most 8 KiB.
const KMSG_RECORD: usize = 8192;

/// The live source.
pub struct Live {
    devices: Devices,
    kmsg: Option<File>,
    kmsg_next: Option<u64>,
    labels: Labels,
    host: String,
    boot_id: String,
    boot_at: i64,
    seq: i64,
    lost: Vec<Lost>,
    ticks: u64,
    next_tick: Instant,
    ready: VecDeque<Telemetry>,
}

fn now_micros() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).ok().and_then(|span| i64::try_from(span.as_micros()).ok()).unwrap_or(0)
}

fn first_line(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().and_then(|text| text.lines().next().map(|line| line.trim().to_owned()))
}

impl Live {
    /// Opens NVML and the kernel log. A kernel log that may not be read is a warning, not an end.
    pub fn open(labels: Labels, host: Option<String>, kmsg: &Path) -> Result<Live, SourceError> {
        let kmsg = match OpenOptions::new().read(true).custom_flags(NONBLOCK).open(kmsg) {
            // Only what comes from now on: nothing remembers yet how far the last run of the agent has read.
            Ok(mut file) => file.seek(SeekFrom::End(0)).ok().map(|_| file),
            Err(error) => {
                tracing::warn!(path = %kmsg.display(), %error, "no kernel log: Xids will not be seen; CAP_SYSLOG is needed");
                None
            }
        };
        let devices = Devices::open()?;
        let host = host.or_else(|| first_line("/proc/sys/kernel/hostname")).unwrap_or_else(|| "unnamed".to_owned());
        let uptime =
            first_line("/proc/uptime").and_then(|line| line.split(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0);
        let labels = Labels { driver_version: devices.driver_version(), ..labels };
        Ok(Live {
            devices,
            kmsg,
            kmsg_next: None,
            labels,
            host,
            boot_id: first_line("/proc/sys/kernel/random/boot_id").unwrap_or_else(|| "unknown".to_owned()),
            boot_at: now_micros() - (uptime * SECOND as f64) as i64,
            // Microseconds since the boot: a restarted agent goes on above every number that it has used in this boot.
            seq: (uptime * SECOND as f64) as i64,
            lost: Vec::new(),
            ticks: 0,
            next_tick: Instant::now(),
            ready: VecDeque::new(),
        })
    }

    fn origin(&mut self, observed_at: i64) -> Origin {
        self.seq += 1;
        Origin {
            host: self.host.clone(),
            boot_id: self.boot_id.clone(),
            seq: self.seq,
            reset_epoch: 0,
            collector_version: env!("CARGO_PKG_VERSION").to_owned(),
            observed_at,
            lost: std::mem::take(&mut self.lost),
        }
    }

    fn flush(&mut self) {
        self.read_kernel_log();
        let count = self.devices.count();
        let mut ticks = Vec::with_capacity(TICKS_PER_FLUSH);
        let mut positions: [Vec<i32>; 3] = Default::default();
        let mut columns: Vec<[Vec<Option<i64>>; METRIC_COUNT]> =
            (0..count).map(|_| std::array::from_fn(|_| Vec::new())).collect();
        for position in 0..TICKS_PER_FLUSH {
            self.wait_for_tick();
            // A wall clock that was set back must not make two ticks of one batch go backwards.
            ticks.push(ticks.last().map_or(now_micros(), |before: &i64| now_micros().max(before + 1)));
            for tier in due(self.ticks) {
                positions[tier as usize].push(i32::try_from(position).unwrap_or(i32::MAX));
                for (i, columns) in columns.iter_mut().enumerate() {
                    self.read(i, tier, columns);
                }
            }
            self.ticks += 1;
        }
        let base = ticks[0];
        let mut batch = GpuBatch {
            origin: self.origin(base),
            labels: self.labels.clone(),
            ticks: ticks.iter().map(|at| at - base).collect(),
            gpus: Vec::with_capacity(count),
        };
        for (i, columns) in columns.into_iter().enumerate() {
            let mut block = self.devices.block(i).clone();
            block.tier_ticks = positions.clone();
            for (metric, values) in Metric::ALL.iter().zip(columns) {
                block.series[metric.index()] = Series::sparse(&values);
            }
            batch.gpus.push(block);
        }
        self.ready.push_back(Telemetry::Batch(batch));
    }

    /// Sleeps until the next tick is due. Ticks that went by while the publisher waited are lost, and counted.
    fn wait_for_tick(&mut self) {
        let now = Instant::now();
        match self.next_tick.checked_duration_since(now) {
            Some(rest) => std::thread::sleep(rest),
            None => {
                let missed = (now - self.next_tick).as_millis() / FAST_PERIOD.as_millis();
                if missed > 0 {
                    let detail = Some("fast ticks that went by while the publisher waited".to_owned());
                    let count = i64::try_from(missed).unwrap_or(i64::MAX);
                    self.lost.push(Lost { reason: LostReason::QueueFull, count, detail });
                    self.next_tick = now;
                }
            }
        }
        self.next_tick += FAST_PERIOD;
    }

    fn read(&mut self, i: usize, tier: Tier, columns: &mut [Vec<Option<i64>>; METRIC_COUNT]) {
        let mut values: Readings = [None; METRIC_COUNT];
        if self.devices.read(i, tier, &mut values) == Health::Lost {
            let block = self.devices.block(i).clone();
            let origin = self.origin(now_micros());
            self.ready.push_back(Telemetry::Event(XidEvent {
                origin,
                labels: self.labels.clone(),
                kind: EventKind::GpuLost,
                gpu_uuid: Some(block.gpu_uuid),
                pci: block.pci,
                message: "GPU is lost".to_owned(),
                raw: "NVML: GPU is lost".to_owned(),
                ..XidEvent::default()
            }));
        }
        for metric in Metric::ALL.iter().filter(|metric| metric.tier() == tier) {
            columns[metric.index()].push(values[metric.index()]);
        }
    }

    /// Takes what the kernel has logged since the last flush. One read gives one record.
    fn read_kernel_log(&mut self) {
        let Some(file) = &mut self.kmsg else { return };
        let mut records = Vec::new();
        let mut buffer = [0u8; KMSG_RECORD];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => records.push(buffer[..length].to_vec()),
                // EPIPE: the ring buffer overran; reading goes on at its oldest record and the sequence tells the gap.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
                Err(_) => break,
            }
        }
        for record in records {
            self.note_gap(&record);
            let clock = kernel_log::Clock { boot_at_micros: Some(self.boot_at), ..kernel_log::Clock::default() };
            let mut events = Vec::new();
            // Reading from memory cannot fail.
            let _ = kernel_log::read(BufReader::new(record.as_slice()), &clock, |event| events.push(event));
            for event in events {
                let origin = self.origin(event.at_micros);
                self.ready.push_back(Telemetry::Event(kernel_event_to_record(event, origin, self.labels.clone())));
            }
        }
    }

    fn note_gap(&mut self, record: &[u8]) {
        let text = String::from_utf8_lossy(record);
        let Some(sequence) = text.split(',').nth(1).and_then(|field| field.parse::<u64>().ok()) else { return };
        if let Some(missing) = self.kmsg_next.and_then(|next| sequence.checked_sub(next)).filter(|missing| *missing > 0)
        {
            self.lost.push(Lost {
                reason: LostReason::KernelLogOverrun,
                count: i64::try_from(missing).unwrap_or(i64::MAX),
                detail: Some(format!("kernel records before sequence {sequence}")),
            });
        }
        self.kmsg_next = Some(sequence + 1);
    }
}

/// The tiers that a tick reads.
fn due(tick: u64) -> impl Iterator<Item = Tier> {
    Tier::ALL.into_iter().filter(move |tier| match tier {
        Tier::Fast => true,
        Tier::Slow => tick.is_multiple_of(SLOW_EVERY),
        Tier::Health => tick.is_multiple_of(HEALTH_EVERY),
    })
}

impl Source for Live {
    fn next(&mut self) -> Result<Option<Telemetry>, SourceError> {
        if self.ready.is_empty() {
            self.flush();
        }
        Ok(self.ready.pop_front())
    }
}
