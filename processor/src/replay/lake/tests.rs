//! Records through the archive's rows into a lake on disk, and back.

use gpufleet_schemas::instant::{DAY, SECOND};
use gpufleet_schemas::metric::Metric;
use gpufleet_schemas::record::{
    EventKind, Explained, GpuBatch, GpuBlock, Group, GroupKind, Labels, Origin, PowerKind, Series, State, Tick,
    Topology, XidEvent,
};

use super::*;
use crate::archive::commit::TableCommits;
use crate::archive::rows::{EventRows, IncidentRows, Place, SampleRows, TickRows, TopologyRows};

const LOG: &str = "cluster/gpu.telemetry";
const TOPIC: &str = "gpu.telemetry";
const MIDNIGHT: i64 = 20_000 * DAY;

async fn lake() -> (tempfile::TempDir, Lake) {
    let folder = tempfile::tempdir().unwrap();
    let lake = Lake::create(&folder.path().join("lake")).await.unwrap();
    (folder, lake)
}

async fn commit(lake: &Lake, table: Table, log_id: &str, partition: i32, rows: Option<RecordBatch>, next: i64) {
    let place = (TOPIC.to_owned(), partition);
    let mut commits = TableCommits::open(lake, table, log_id, std::slice::from_ref(&place)).await.unwrap();
    commits.commit(rows, &BTreeMap::from([(place, next)])).await.unwrap();
}

/// Does what the archive does with records; each table comes to the offset after the last one.
async fn archive(lake: &Lake, log_id: &str, partition: i32, records: &[Kept]) {
    let (mut samples, mut events) = (SampleRows::default(), EventRows::default());
    let (mut ticks, mut topology) = (TickRows::default(), TopologyRows::default());
    for Kept { offset, appended_at, record } in records {
        let place = Place { log_id, topic: TOPIC, partition, offset: *offset, ingested_at: *appended_at };
        match record {
            Telemetry::Batch(batch) => samples.push(place, batch),
            Telemetry::Event(event) => events.push(place, event),
            Telemetry::Tick(tick) => ticks.push(place, tick),
            Telemetry::Topology(record) => topology.push(place, record),
        }
    }
    let next = records.last().map_or(0, |kept| kept.offset + 1);
    for table in Table::TELEMETRY {
        let rows = match table {
            Table::GpuSamples => samples.finish(),
            Table::XidEvents => events.finish(),
            Table::Ticks => ticks.finish(),
            _ => topology.finish(),
        };
        let rows = Some(rows.unwrap()).filter(|rows| rows.num_rows() > 0);
        commit(lake, table, log_id, partition, rows, next).await;
    }
}

fn origin(seq: i64, observed_at: i64) -> Origin {
    Origin {
        host: "node-1".into(),
        boot_id: "boot".into(),
        seq,
        reset_epoch: 2,
        collector_version: "0.1.0".into(),
        observed_at,
        lost: Vec::new(),
    }
}

fn labels() -> Labels {
    Labels {
        site: Some("site".into()),
        row: None,
        rack: Some("rack-7".into()),
        feeds: vec!["A".into(), "B".into()],
        driver_version: Some("570.86".into()),
    }
}

fn block(index: i32, tier_ticks: [&[i32]; 3], series: &[(Metric, &[Option<i64>])]) -> GpuBlock {
    let mut block = GpuBlock {
        gpu_uuid: format!("GPU-{index}"),
        gpu_index: Some(index),
        pci: Some(format!("00000000:{index:02x}:00")),
        model: Some("NVIDIA H100 80GB HBM3".into()),
        job_id: (index == 0).then(|| "job-1".into()),
        step: (index == 0).then_some(12),
        power_kind: PowerKind::Instant,
        tier_ticks: tier_ticks.map(<[i32]>::to_vec),
        ..GpuBlock::default()
    };
    for (metric, values) in series {
        block.series[metric.index()] = Series::sparse(values);
    }
    block
}

/// Two GPUs over midnight; the second missed ticks.
fn batch(seq: i64) -> GpuBatch {
    let (a, b, c, d) = (Some(400_000), Some(410_000), Some(420_000), Some(430_000));
    GpuBatch {
        origin: origin(seq, MIDNIGHT - 150_000),
        labels: labels(),
        ticks: vec![0, 100_000, 200_000, 300_000],
        gpus: vec![
            block(
                0,
                [&[0, 1, 2, 3], &[0, 2], &[0]],
                &[
                    (Metric::PowerDraw, &[a, b, c, d]),
                    (Metric::ClocksEventReasons, &[Some(4), None, Some(0x40), Some(0)]),
                    (Metric::TemperatureGpu, &[Some(61), None]),
                    (Metric::Energy, &[Some(1 << 40), Some((1 << 40) + 7)]),
                    (Metric::EccSbeVolatile, &[Some(3)]),
                ],
            ),
            block(1, [&[0, 2], &[], &[]], &[(Metric::PowerDraw, &[d, a])]),
        ],
    }
}

fn event(seq: i64) -> XidEvent {
    XidEvent {
        origin: origin(seq, MIDNIGHT + 5),
        labels: labels(),
        kind: EventKind::Xid,
        code: Some(79),
        gpu_uuid: None,
        pci: Some("00000000:01:00".into()),
        pid: Some(4711),
        process: Some("python".into()),
        gpu_instance: None,
        compute_instance: Some(1),
        job_id: None,
        message: "GPU has fallen off the bus.".into(),
        raw: "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.".into(),
        kmsg_sequence: Some(99),
        time_estimated: true,
    }
}

fn group(kind: GroupKind, key: &str, hosts: &[&str], rating_watts: Option<i64>) -> Group {
    Group { kind, key: key.into(), hosts: hosts.iter().map(|host| (*host).to_owned()).collect(), rating_watts }
}

fn topology(groups: Vec<Group>) -> Telemetry {
    Telemetry::Topology(Topology { epoch_at: MIDNIGHT - SECOND, writer: "topology".into(), groups })
}

fn tick(second: i64) -> Telemetry {
    Telemetry::Tick(Tick { tick_at: MIDNIGHT + second * SECOND, writer: "clock".into() })
}

/// Every kind of record; offset 3 was a repeat, say.
fn records() -> Vec<Kept> {
    let groups = vec![
        group(GroupKind::Job, "job-1", &["node-2", "node-1"], None),
        group(GroupKind::PowerDomain, "site/A", &["node-1"], Some(400_000)),
        group(GroupKind::Rack, "rack-8", &[], None),
        group(GroupKind::Rack, "rack-9", &["node-9"], None),
    ];
    let records = [
        (0, topology(groups)),
        (1, Telemetry::Batch(batch(0))),
        (2, tick(0)),
        (4, Telemetry::Event(event(2))),
        (5, tick(0)),
        (6, Telemetry::Batch(batch(3))),
        (7, topology(Vec::new())),
        (8, tick(1)),
    ];
    let kept =
        |(offset, record): (i64, Telemetry)| Kept { offset, appended_at: MIDNIGHT + 10 * SECOND + offset, record };
    records.into_iter().map(kept).collect()
}

async fn all(lake: &Lake, log_id: &str, partition: i32) -> Vec<Kept> {
    super::partition(lake, log_id, TOPIC, partition, None, MetricSet::ALL).await.unwrap()
}

#[tokio::test]
async fn records_come_back_as_they_were_and_in_the_order_of_the_log() {
    let (_folder, lake) = lake().await;
    let records = records();
    let (first, second) = records.split_at(4);
    archive(&lake, LOG, 1, first).await;
    archive(&lake, LOG, 1, second).await;
    archive(&lake, LOG, 2, &records[2..3]).await;
    archive(&lake, "other", 1, &records[..2]).await;
    assert_eq!(all(&lake, LOG, 1).await, records);
    assert_eq!(all(&lake, LOG, 2).await, records[2..3]);
    assert_eq!(all(&lake, "other", 1).await, records[..2]);
    assert!(all(&lake, LOG, 3).await.is_empty());
    let log = |id: &str, partitions: &[i32]| (id.to_owned(), TOPIC.to_owned(), partitions.to_vec());
    assert_eq!(logs(&lake).await.unwrap(), [log(LOG, &[1, 2]), log("other", &[1])]);
}

#[tokio::test]
async fn a_record_from_the_end_on_is_left_out_whole() {
    let (_folder, lake) = lake().await;
    archive(&lake, LOG, 0, &records()).await;
    let offsets = async |until: i64| {
        let kept = super::partition(&lake, LOG, TOPIC, 0, Some(until), MetricSet::NONE).await.unwrap();
        kept.iter().map(|kept| kept.offset).collect::<Vec<_>>()
    };
    // The batches end 150 ms after midnight.
    assert_eq!(offsets(MIDNIGHT + 150_000).await, [0, 2, 4, 5, 7]);
    assert_eq!(offsets(MIDNIGHT + 150_001).await, [0, 1, 2, 4, 5, 6, 7]);
    assert_eq!(offsets(MIDNIGHT).await, [0, 7]);
}

#[tokio::test]
async fn what_one_table_has_not_come_to_is_left_out_of_all() {
    let (_folder, lake) = lake().await;
    let records = records();
    archive(&lake, LOG, 0, &records[..4]).await;
    let mut ticks = TickRows::default();
    let place = Place { log_id: LOG, topic: TOPIC, partition: 0, offset: 5, ingested_at: 0 };
    ticks.push(place, &Tick { tick_at: MIDNIGHT, writer: "clock".into() });
    commit(&lake, Table::Ticks, LOG, 0, Some(ticks.finish().unwrap()), 9).await;
    assert_eq!(all(&lake, LOG, 0).await, records[..4]);
}

#[tokio::test]
async fn a_tick_that_no_gpu_read_is_gone_and_unwanted_metrics_are_absent() {
    let (_folder, lake) = lake().await;
    let power: (Metric, &[Option<i64>]) = (Metric::PowerDraw, &[Some(1), Some(2)]);
    let clock: (Metric, &[Option<i64>]) = (Metric::ClockSm, &[Some(1980), Some(1975)]);
    let sent = GpuBatch {
        origin: origin(0, 1000),
        labels: Labels::default(),
        ticks: vec![0, 10, 20, 30],
        gpus: vec![block(3, [&[1, 3], &[], &[]], &[power, clock])],
    };
    archive(&lake, LOG, 0, &[Kept { offset: 0, appended_at: 0, record: Telemetry::Batch(sent.clone()) }]).await;
    let wanted = MetricSet::of(&[Metric::ClockSm]);
    let kept = super::partition(&lake, LOG, TOPIC, 0, None, wanted).await.unwrap();
    let expected = GpuBatch {
        origin: origin(0, 1010),
        ticks: vec![0, 20],
        gpus: vec![block(3, [&[0, 1], &[], &[]], &[clock])],
        ..sent
    };
    assert_eq!(kept, [Kept { offset: 0, appended_at: 0, record: Telemetry::Batch(expected) }]);
    assert_eq!(kept[0].record.newest_at(), 1030);
}

#[test]
fn gpus_stand_in_the_order_of_their_index_and_ticks_in_theirs() {
    let mut rows = SampleRows::default();
    let place = Place { log_id: LOG, topic: TOPIC, partition: 0, offset: 7, ingested_at: 1 };
    // By identity GPU-10 comes before GPU-9.
    let (nine, ten) = (block(9, [&[0, 1], &[], &[]], &[]), block(10, [&[0, 1], &[], &[]], &[]));
    let ticks = vec![0, 10];
    let sent = GpuBatch { origin: origin(0, 5), labels: labels(), ticks, gpus: vec![nine, ten] };
    rows.push(place, &sent);
    let rows = rows.finish().unwrap();
    let mut batches = Batches::of(MetricSet::ALL);
    // The later tick first, as files of two days may come.
    for i in (0..rows.num_rows()).rev() {
        batches.add(&Columns::of(Table::GpuSamples, &rows.slice(i, 1))).unwrap();
    }
    assert_eq!(batches.finish(), [Kept { offset: 7, appended_at: 1, record: Telemetry::Batch(sent) }]);
}

#[tokio::test]
async fn every_revision_of_the_incidents_of_the_log_comes_back() {
    let (_folder, lake) = lake().await;
    let incident = |id: &str, revision: i32| Incident {
        id: id.into(),
        revision,
        kind: "power_oscillation".into(),
        state: if revision == 0 { State::Open } else { State::Resolved },
        feed: Some("site/A".into()),
        onset_at: MIDNIGHT - i64::from(id == "b"),
        end_at: (revision > 0).then_some(MIDNIGHT + 9),
        decided_at: MIDNIGHT + 10,
        summary: format!("{id} {revision}"),
        log_id: LOG.into(),
        topic: TOPIC.into(),
        partition: 3,
        task: "task".into(),
        ..Incident::default()
    };
    let mut rows = IncidentRows::default();
    let place =
        |log_id: &'static str, offset| Place { log_id, topic: "incidents", partition: 0, offset, ingested_at: 0 };
    let explains = vec![Explained { kind: "xid".into(), code: Some(79), onset_at: 1, summary: "off the bus".into() }];
    rows.push(place(LOG, 0), &Incident { explains, coverage: Some(0.75), ..incident("a", 1) });
    rows.push(place(LOG, 1), &incident("a", 0));
    rows.push(place(LOG, 2), &incident("b", 0));
    rows.push(place("other", 0), &incident("a", 2));
    let rows = rows.finish().unwrap();
    let explains: &arrow::array::StringArray = rows["explains"].as_string();
    assert_eq!(explains.value(0), r#"[{"kind":"xid","code":79,"onset_at":1,"summary":"off the bus"}]"#);
    assert!(arrow::array::Array::is_null(explains, 1), "nothing is explained");
    let coverage = rows["coverage"].as_primitive::<arrow::datatypes::Float64Type>();
    assert!((coverage.value(0) - 0.75).abs() < f64::EPSILON);
    commit(&lake, Table::Incidents, LOG, 0, Some(rows), 3).await;
    assert_eq!(incidents(&lake, LOG).await.unwrap(), [incident("b", 0), incident("a", 0), incident("a", 1)]);
}
