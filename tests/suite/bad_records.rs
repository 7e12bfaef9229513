//! Bytes that are no record: to the dead letters with where they came from, a row in `losses`, and the rest intact.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gpufleet_runtime::kafka::{Destination, Writer};
use gpufleet_schemas::record::{Incident, Telemetry, Tick};
use gpufleet_schemas::wire::Encoder;
use gpufleet_tests::kafka;
use gpufleet_tests::lake::{ask, number};
use gpufleet_tests::log::{Busy, Log, PARTITIONS};
use gpufleet_tests::programs::run;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

/// Reason and bytes of each kind of bad record.
fn bad() -> Vec<(&'static str, Vec<u8>)> {
    let (encoder, mut tick, mut incident) = (Encoder::default(), Vec::new(), Vec::new());
    encoder.telemetry(&Telemetry::Tick(Tick { tick_at: 1, writer: "test".into() }), &mut tick);
    encoder.incident(&Incident::default(), &mut incident);
    vec![
        ("empty", Vec::new()),
        ("foreign", b"{\"gpu\": 3, \"watts\": 612}".to_vec()),
        ("foreign", vec![0, 0, 0, 0, 42, 2, 2]),
        ("truncated", tick[..tick.len() - 1].to_vec()),
        ("truncated", tick[..5].to_vec()),
        ("trailing_bytes", [tick.clone(), vec![0]].concat()),
        ("unknown_schema", [&tick[..2], &[7; 8], &tick[10..]].concat()),
        ("wrong_type", incident),
    ]
}

#[test]
fn bad_records_are_counted_by_reason_and_kept_as_dead_letters_and_nothing_else_is_lost() {
    let mut log = Log::create(kafka::shared().bootstrap());
    log.publish(&mut Busy::new(3, 8, 30, 5));
    let writer = Writer::open(&log.brokers).expect("a writer");
    let mut injected: BTreeMap<String, i64> = BTreeMap::new();
    for round in 0..3 {
        for (i, (reason, bytes)) in bad().iter().enumerate() {
            let partition = (i as i32 + round) % PARTITIONS;
            let to = Destination { topic: &log.topics.telemetry, partition };
            writer.send(to, b"bad", Some(bytes), &[], |_| {}).expect("accepted");
            *injected.entry((*reason).to_owned()).or_default() += 1;
        }
    }
    writer.flush(Duration::from_secs(30)).expect("acknowledged");
    log.publish(&mut Busy::new(4, 8, 30, 0));
    let folder = tempfile::tempdir().expect("a folder");
    let lake = folder.path().join("lake");
    let mut arguments = vec!["archive".to_owned()];
    arguments.extend(log.arguments());
    arguments.extend(["--lake".to_owned(), lake.display().to_string()]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = run("gpufleet-processor", &arguments, folder.path());
    assert_eq!(done.code, 0, "{}", done.stderr);
    // The second fleet has the first one's hosts and numbers under another boot: nothing of it is a repeat.
    assert_eq!(number(&lake, "SELECT count(*) FROM gpu_samples"), i64::try_from(log.samples).unwrap());
    let counted: BTreeMap<String, i64> = ask(&lake, "SELECT reason, sum(count) AS n FROM losses GROUP BY reason")
        .iter()
        .map(|row| (row["reason"].as_str().expect("text").to_owned(), row["n"].as_i64().expect("a number")))
        .collect();
    assert_eq!(counted, injected);
    check_dead_letters(&log, &lake, &injected);
}

/// Every dead letter says where it came from and why, as the row in `losses` does.
fn check_dead_letters(log: &Log, lake: &std::path::Path, injected: &BTreeMap<String, i64>) {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", &log.brokers)
        .set("group.id", "test")
        .set("enable.auto.commit", "false")
        .create()
        .expect("a consumer");
    let mut assignment = TopicPartitionList::new();
    assignment.add_partition_offset(&log.topics.dead_letters, 0, Offset::Beginning).expect("assigns");
    consumer.assign(&assignment).expect("assigns");
    let (mut letters, start) = (BTreeMap::<String, i64>::new(), Instant::now());
    let total: i64 = injected.values().sum();
    while letters.values().sum::<i64>() < total && start.elapsed() < Duration::from_secs(30) {
        let Some(message) = consumer.poll(Duration::from_millis(200)) else { continue };
        let message = message.expect("a message");
        let headers: BTreeMap<&str, &str> = message
            .headers()
            .expect("headers")
            .iter()
            .filter_map(|header| Some((header.key, std::str::from_utf8(header.value?).ok()?)))
            .collect();
        assert_eq!(headers["source_topic"], log.topics.telemetry);
        let row = format!(
            "SELECT count(*) FROM losses WHERE partition = {} AND \"offset\" = {} AND reason = '{}'",
            headers["source_partition"], headers["source_offset"], headers["reason"]
        );
        assert_eq!(number(lake, &row), 1, "{row}");
        assert_eq!(message.key(), Some(&b"bad"[..]));
        assert!(
            bad()
                .iter()
                .any(|(reason, bytes)| *reason == headers["reason"] && bytes == message.payload().unwrap_or_default())
        );
        *letters.entry(headers["reason"].to_owned()).or_default() += 1;
    }
    assert_eq!(&letters, injected);
}
