use apache_avro::types::Value;
use apache_avro::{AvroResult, Schema};
use proptest::prelude::*;

use super::*;
use crate::compatibility::full_transitive;
use crate::metric::{METRIC_COUNT, Metric, Tier};
use crate::record::*;

/// The library's generic reader and writer, which know nothing of ours.
fn read_datum(writer: &Schema, bytes: &mut &[u8], reader: Option<&Schema>) -> AvroResult<Value> {
    #[expect(deprecated, reason = "the datum readers that replace it come with a builder each and say no more here")]
    apache_avro::from_avro_datum(writer, bytes, reader)
}

fn write_datum(schema: &Schema, value: Value) -> AvroResult<Vec<u8>> {
    #[expect(deprecated, reason = "as above")]
    apache_avro::to_avro_datum(schema, value)
}

const LATER: &str = include_str!("../../fixtures/gpu_batch.later.avsc");
const INCOMPATIBLE: &str = include_str!("../../fixtures/gpu_batch.incompatible.avsc");

fn released(name: &str) -> &'static str {
    RELEASED.iter().find(|(file, _)| *file == name).expect("released").1
}

fn origin() -> Origin {
    Origin {
        host: "node-07".into(),
        boot_id: "4a6e6a1e".into(),
        seq: 41,
        reset_epoch: 2,
        collector_version: "0.1.0".into(),
        observed_at: 1_772_442_000_000_000,
        lost: vec![Lost { reason: LostReason::QueueFull, count: 3, detail: Some("fast queue".into()) }],
    }
}

fn labels() -> Labels {
    Labels {
        site: Some("north".into()),
        row: None,
        rack: Some("r12".into()),
        feeds: vec!["A".into(), "B".into()],
        driver_version: Some("570.86.15".into()),
    }
}

/// Two GPUs, five ticks; the second GPU misses a tick, skipped two, and cannot tell its memory temperature.
fn sample_batch() -> GpuBatch {
    let mut first = GpuBlock {
        gpu_uuid: "GPU-aaaa".into(),
        gpu_index: Some(0),
        pci: Some("00000000:1b:00".into()),
        model: Some("NVIDIA H100 80GB HBM3".into()),
        job_id: Some("4711".into()),
        step: Some(12),
        power_kind: PowerKind::Instant,
        tier_ticks: [vec![0, 1, 2, 3, 4], vec![0], vec![]],
        ..GpuBlock::default()
    };
    first.series[Metric::PowerDraw.index()] = Series::dense(vec![688_120, 690_000, 691_500, 689_000, 300_000]);
    first.series[Metric::ClocksEventReasons.index()] = Series::dense(vec![4, 4, 4, 0x44, 0]);
    first.series[Metric::TemperatureGpu.index()] = Series::dense(vec![61]);
    let mut second =
        GpuBlock { gpu_uuid: "node-07#1".into(), tier_ticks: [vec![0, 1, 4], vec![], vec![4]], ..GpuBlock::default() };
    second.series[Metric::PowerDraw.index()] = Series::sparse(&[Some(70_000), None, Some(71_000)]);
    second.series[Metric::EccDbeVolatile.index()] = Series::dense(vec![i64::MAX]);
    GpuBatch {
        origin: origin(),
        labels: labels(),
        ticks: vec![0, 100_000, 200_000, 300_000, 400_000],
        gpus: vec![first, second],
    }
}

fn sample_event() -> XidEvent {
    XidEvent {
        origin: origin(),
        labels: labels(),
        kind: EventKind::Xid,
        code: Some(79),
        gpu_uuid: Some("GPU-aaaa".into()),
        pci: Some("00000000:1b:00".into()),
        pid: Some(4242),
        process: Some("python3".into()),
        gpu_instance: Some(1),
        compute_instance: None,
        job_id: None,
        message: "GPU has fallen off the bus.".into(),
        raw: "NVRM: Xid (PCI:0000:1b:00): 79, pid=4242, name=python3, GPU has fallen off the bus.".into(),
        kmsg_sequence: Some(1227),
        time_estimated: true,
    }
}

fn sample_incident() -> Incident {
    Incident {
        id: "b2f1".into(),
        revision: 1,
        kind: "xid".into(),
        state: State::Resolved,
        severity: Severity::Critical,
        host: "node-07".into(),
        gpu_uuid: Some("GPU-aaaa".into()),
        code: Some(79),
        onset_at: 10,
        end_at: Some(20),
        decided_at: 30,
        statistic: "xid".into(),
        value: 79.0,
        threshold: -0.5,
        count: 2,
        summary: "Xid 79".into(),
        actions: vec!["RESTART_BM".into(), "CONTACT_SUPPORT".into()],
        evidence: vec![Evidence { at: 10, name: "ecc_dbe_volatile".into(), value: 1, before: Some(7), reset: true }],
        feed: Some("north/A".into()),
        explains: vec![Explained { kind: "xid".into(), code: Some(48), onset_at: 9, summary: "Xid 48".into() }],
        coverage: Some(0.75),
        emit_seq: 5,
        ..Incident::default()
    }
}

fn framed(record: &Telemetry) -> Vec<u8> {
    let mut out = Vec::new();
    Encoder::default().telemetry(record, &mut out);
    out
}

fn check(record: &Telemetry) {
    let bytes = framed(record);
    let mut decoder = Decoder::default();
    let decoded = match decoder.telemetry(&bytes).expect("decodes") {
        Decoded::Batch(batch) => Telemetry::Batch(batch.clone()),
        Decoded::Event(event) => Telemetry::Event(event),
        Decoded::Tick(tick) => Telemetry::Tick(tick),
        Decoded::Topology(topology) => Telemetry::Topology(topology),
    };
    assert_eq!(&decoded, record);
}

fn sample_topology() -> Topology {
    let hosts = vec!["node-07".to_owned(), "node-08".to_owned()];
    Topology {
        epoch_at: 1_772_442_000_000_000,
        writer: "site file".into(),
        groups: vec![
            Group { kind: GroupKind::PowerDomain, key: "north/A".into(), hosts, rating_watts: Some(24_000) },
            Group { kind: GroupKind::Rack, key: "r12".into(), hosts: Vec::new(), rating_watts: None },
        ],
    }
}

fn sample_partial() -> Partial {
    Partial {
        task: "log/gpu.telemetry/3".into(),
        emit_seq: 17,
        group: GroupKind::PowerDomain,
        key: "north/A".into(),
        host: "node-07".into(),
        pane_at: 1_772_442_000_000_000,
        gpus: 8,
        samples: 400,
        milliwatts: vec![Some(2_800_000), None, Some(-1), Some(0), Some(i64::MAX)],
        first_offset: 5,
        last_offset: 9,
    }
}

fn sample_upstream() -> [Upstream; 4] {
    let task = || "log/gpu.telemetry/3".to_owned();
    [
        Upstream::Partial(sample_partial()),
        Upstream::Watermark(Watermark { task: task(), emit_seq: 18, watermark_at: 1_772_442_005_000_000 }),
        Upstream::Exclusion(Exclusion {
            task: "log/fleet.partials/0".into(),
            emit_seq: 2,
            excluded: task(),
            watermark_at: -4,
        }),
        Upstream::Topology { task: task(), emit_seq: 0, topology: sample_topology() },
    ]
}

fn framed_upstream(record: &Upstream) -> Vec<u8> {
    let mut out = Vec::new();
    Encoder::default().upstream(record, &mut out);
    out
}

fn golden_records() -> Vec<(&'static str, Vec<u8>)> {
    let mut incident = Vec::new();
    Encoder::default().incident(&sample_incident(), &mut incident);
    vec![
        ("gpu_batch.v1", framed(&Telemetry::Batch(sample_batch()))),
        ("xid_event.v1", framed(&Telemetry::Event(sample_event()))),
        ("tick.v1", framed(&Telemetry::Tick(Tick { tick_at: 1_772_442_001_000_000, writer: "simulator".into() }))),
        ("incident.v2", incident),
        ("topology.v1", framed(&Telemetry::Topology(sample_topology()))),
    ]
    .into_iter()
    .chain(
        ["partial.v1", "watermark.v1", "exclusion.v1", "epoch.v1"]
            .into_iter()
            .zip(sample_upstream().iter().map(framed_upstream)),
    )
    .collect()
}

#[test]
fn an_incident_of_the_first_version_is_still_read() {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/incident.v1.bin")).expect("golden");
    let found = Decoder::default().incident(&bytes).expect("decodes");
    assert_eq!(found, Incident { feed: None, explains: Vec::new(), coverage: None, ..sample_incident() });
}

#[test]
fn every_record_survives_the_wire() {
    check(&Telemetry::Batch(sample_batch()));
    check(&Telemetry::Batch(GpuBatch { origin: origin(), ..GpuBatch::default() }));
    check(&Telemetry::Event(sample_event()));
    check(&Telemetry::Tick(Tick { tick_at: 946_684_800_000_000, writer: "x".into() }));
    check(&Telemetry::Topology(sample_topology()));
    for record in sample_upstream() {
        assert_eq!(Decoder::default().upstream(&framed_upstream(&record)).expect("decodes"), record);
    }
    let mut bytes = Vec::new();
    Encoder::default().incident(&sample_incident(), &mut bytes);
    assert_eq!(Decoder::default().incident(&bytes).expect("decodes"), sample_incident());
}

#[test]
fn golden_bytes_of_every_released_version_are_still_written_and_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/golden");
    for (name, bytes) in golden_records() {
        let path = format!("{folder}/{name}.bin");
        if std::env::var_os("UPDATE").is_some() && !std::path::Path::new(&path).exists() {
            std::fs::write(&path, &bytes).expect("writes");
        }
        assert_eq!(
            std::fs::read(&path).expect(&path),
            bytes,
            "{name}: the encoder writes other bytes than were released"
        );
    }
}

#[test]
fn an_independent_implementation_reads_our_bytes() {
    for (name, bytes) in golden_records() {
        let schema = Schema::parse_str(released(name)).expect("parses");
        let mut body = &bytes[HEADER_BYTES..];
        let value = read_datum(&schema, &mut body, None).expect(name);
        assert!(body.is_empty(), "{name} leaves bytes");
        assert_eq!(write_datum(&schema, value).expect(name), bytes[HEADER_BYTES..], "{name}");
    }
}

#[test]
fn a_reader_of_today_reads_a_later_version_and_the_other_way_round() {
    let (today, later) = (Schema::parse_str(released("gpu_batch.v1")).unwrap(), Schema::parse_str(LATER).unwrap());
    full_transitive(&[("gpu_batch.v1", released("gpu_batch.v1")), ("later", LATER)]).expect("compatible");
    let bytes = framed(&Telemetry::Batch(sample_batch()));
    // Old bytes, new reader: the new fields come out as their defaults.
    let value =
        read_datum(&today, &mut &bytes[HEADER_BYTES..], Some(&later)).expect("a later reader reads today's bytes");
    // New bytes, old reader.
    let Value::Record(mut fields) = value else { panic!("a record") };
    let Value::Record(origin) = &mut fields[0].1 else { panic!("a record") };
    let agent = origin.iter_mut().find(|(name, _)| name == "agent_id").expect("the new field");
    agent.1 = Value::Union(1, Box::new(Value::String("a-7".into())));
    let body = write_datum(&later, Value::Record(fields)).expect("writes");
    let mut newer = MAGIC.to_vec();
    newer.extend(fingerprint(LATER).unwrap().to_le_bytes());
    newer.extend(body);
    let mut decoder = Decoder::default();
    assert_eq!(decoder.telemetry(&newer).unwrap_err(), DecodeError::UnknownSchema(fingerprint(LATER).unwrap()));
    decoder.learn(LATER).expect("learns");
    match decoder.telemetry(&newer).expect("decodes") {
        Decoded::Batch(batch) => assert_eq!(batch, &sample_batch()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_released_version_reads_every_other_and_an_incompatible_one_is_refused() {
    for record in
        ["gpu_batch", "xid_event", "tick", "incident", "topology", "epoch", "partial", "watermark", "exclusion"]
    {
        let versions: Vec<_> = RELEASED.iter().copied().filter(|(name, _)| name.starts_with(record)).collect();
        assert!(!versions.is_empty());
        full_transitive(&versions).expect(record);
    }
    let refused = full_transitive(&[("gpu_batch.v1", released("gpu_batch.v1")), ("incompatible", INCOMPATIBLE)]);
    assert!(refused.expect_err("refused").contains("incompatible"));
}

#[test]
fn the_metric_table_and_the_released_schema_name_the_same_fields() {
    let schema = Schema::parse_str(released("gpu_batch.v1")).expect("parses");
    let compiled = schema::compile(&schema).expect("compiles");
    let schema::Node::Array(items) = &compiled.fields[3].node else { panic!("gpus") };
    let schema::Node::Record(block) = &**items else { panic!("GpuBlock") };
    let metrics: Vec<_> = block.fields.iter().filter_map(|field| field.metric).collect();
    assert_eq!(metrics, Metric::ALL);
    assert_eq!(metrics.len(), METRIC_COUNT);
}

#[test]
fn every_vocabulary_and_its_released_enum_have_the_same_symbols_in_the_same_order() {
    let symbols = |text: &str, name: &str| {
        let at = text.find(&format!("\"name\": \"{name}\"")).expect(name);
        let list = &text[at + text[at..].find("\"symbols\"").expect(name)..];
        let list = &list[list.find('[').unwrap() + 1..list.find(']').unwrap()];
        list.split(',').map(|symbol| symbol.trim().trim_matches('"').to_owned()).collect::<Vec<_>>()
    };
    macro_rules! same {
        ($file:literal, $name:ident) => {
            let ours: Vec<_> = $name::ALL.iter().map(|symbol| symbol.as_str().to_owned()).collect();
            assert_eq!(ours, symbols(released($file), stringify!($name)));
        };
    }
    same!("gpu_batch.v1", LostReason);
    same!("gpu_batch.v1", PowerKind);
    same!("xid_event.v1", EventKind);
    same!("incident.v1", Severity);
    same!("incident.v2", State);
    same!("partial.v1", GroupKind);
    same!("topology.v1", GroupKind);
}

#[test]
fn a_reader_that_wants_one_metric_gets_that_one_and_all_else_but_metrics() {
    let bytes = framed(&Telemetry::Batch(sample_batch()));
    let mut decoder = Decoder::wanting(MetricSet::of(&[Metric::TemperatureGpu]));
    let Decoded::Batch(batch) = decoder.telemetry(&bytes).expect("decodes") else { panic!("a batch") };
    assert_eq!(batch.gpus[0].readings(Metric::TemperatureGpu).collect::<Vec<_>>(), [(0, 61)]);
    assert!(batch.gpus[0].series(Metric::PowerDraw).is_empty());
    assert_eq!(batch.gpus[1].ticks(Tier::Fast), [0, 1, 4]);
    assert_eq!(batch.sample_count(), 8);
}

#[test]
fn a_missing_tick_is_absent_and_never_zero() {
    let batch = sample_batch();
    assert_eq!(batch.gpus[1].readings(Metric::PowerDraw).collect::<Vec<_>>(), [(0, 70_000), (4, 71_000)]);
    assert_eq!(batch.gpus[1].series(Metric::PowerDraw).get(1), None);
}

#[test]
fn each_kind_of_bad_bytes_has_its_reason() {
    let good = framed(&Telemetry::Batch(sample_batch()));
    let reason = |bytes: &[u8]| Decoder::default().telemetry(bytes).map(|_| ()).unwrap_err().reason();
    assert_eq!(reason(b""), "empty");
    assert_eq!(reason(b"{\"gpu\": 1, \"watts\": 300}"), "foreign");
    assert_eq!(reason(&[0, 0, 0, 0, 7, 1]), "foreign");
    assert_eq!(reason(&MAGIC), "truncated");
    assert_eq!(reason(&[&MAGIC[..], &[9; 12]].concat()), "unknown_schema");
    assert_eq!(reason(&good[..good.len() - 1]), "truncated");
    assert_eq!(reason(&[&good[..], &[0]].concat()), "trailing_bytes");
    assert_eq!(reason(&vec![0; MAX_RECORD_BYTES + 1]), "too_large");
    let mut incident = Vec::new();
    Encoder::default().incident(&sample_incident(), &mut incident);
    assert_eq!(reason(&incident), "wrong_type");
    let mut no_identity = sample_batch();
    no_identity.gpus[0].gpu_uuid.clear();
    assert_eq!(reason(&framed(&Telemetry::Batch(no_identity))), "malformed");
}

#[test]
fn an_instant_that_is_no_time_is_refused() {
    for at in [i64::MIN, -1, 0, 946_684_799_999_999, 7_258_118_400_000_000, i64::MAX] {
        let mut batch = sample_batch();
        batch.origin.observed_at = at;
        let mut event = sample_event();
        event.origin.observed_at = at;
        let tick = Tick { tick_at: at, writer: String::new() };
        for record in [Telemetry::Batch(batch), Telemetry::Event(event), Telemetry::Tick(tick)] {
            let refused = Decoder::default().telemetry(&framed(&record)).map(|_| ());
            assert_eq!(refused.unwrap_err().reason(), "malformed", "{at}");
        }
    }
    let mut batch = sample_batch();
    batch.ticks[4] = i64::MAX;
    assert!(Decoder::default().telemetry(&framed(&Telemetry::Batch(batch))).is_err());
}

#[test]
fn a_record_cut_at_any_byte_is_refused_and_the_next_one_is_read() {
    let good = framed(&Telemetry::Batch(sample_batch()));
    let mut decoder = Decoder::default();
    for length in 0..good.len() {
        assert!(decoder.telemetry(&good[..length]).is_err(), "{length} bytes");
    }
    match decoder.telemetry(&good).expect("decodes") {
        Decoded::Batch(batch) => assert_eq!(batch, &sample_batch()),
        other => panic!("{other:?}"),
    }
}

fn any_series(ticks: usize) -> impl Strategy<Value = Series> {
    prop_oneof![
        Just(Series::default()),
        prop::collection::vec(any::<i64>(), ticks).prop_map(Series::dense),
        prop::collection::vec(any::<Option<i64>>(), ticks).prop_map(|values| Series::sparse(&values)),
    ]
}

fn any_batch() -> impl Strategy<Value = GpuBatch> {
    (1usize..8, 946_684_800_000_000i64..7_258_000_000_000_000).prop_flat_map(|(ticks, base)| {
        let block =
            (prop::collection::vec(any_series(ticks), METRIC_COUNT), "[a-zA-Z0-9-]{1,40}", any::<Option<i32>>())
                .prop_map(move |(series, gpu_uuid, gpu_index)| {
                    let every: Vec<i32> = (0..ticks as i32).collect();
                    let mut block = GpuBlock { gpu_uuid, gpu_index, ..GpuBlock::default() };
                    block.tier_ticks = [every.clone(), every.clone(), every];
                    block.series = series.try_into().expect("one a metric");
                    block
                });
        prop::collection::vec(block, 0..4).prop_map(move |gpus| GpuBatch {
            origin: Origin { observed_at: base, ..origin() },
            labels: labels(),
            ticks: (0..ticks as i64).map(|tick| tick * 100_000).collect(),
            gpus,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_batch_survives_the_wire(batch in any_batch()) {
        check(&Telemetry::Batch(batch));
    }

    #[test]
    fn no_bytes_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), which in 0usize..9) {
        let headers = golden_records();
        let _ = Decoder::default().telemetry(&bytes).map(|_| ());
        bytes.splice(0..0, headers[which].1[..HEADER_BYTES].iter().copied());
        let _ = Decoder::default().telemetry(&bytes).map(|_| ());
        let _ = Decoder::default().incident(&bytes);
        let _ = Decoder::default().upstream(&bytes);
    }

    #[test]
    fn no_damaged_batch_panics(at in 0usize..400, value in any::<u8>()) {
        let mut bytes = framed(&Telemetry::Batch(sample_batch()));
        let at = at % bytes.len();
        bytes[at] = value;
        let _ = Decoder::default().telemetry(&bytes).map(|_| ());
    }
}
