//! The embedded broker keeps little: what has gone is an error, never a silent skip.

use std::time::Duration;

use gpufleet_runtime::kafka::{Destination, Reader, Start, Writer, offsets};
use gpufleet_schemas::Topics;
use gpufleet_standalone::broker::EmbeddedBroker;

#[test]
fn a_reader_that_the_start_of_the_log_has_overtaken_fails_loudly() {
    let topics = Topics::with_prefix("");
    let broker = EmbeddedBroker::start(&topics, 1, 1).expect("a broker");
    let writer = Writer::open(&broker.bootstrap()).expect("a writer");
    // Numbers that do not compress, well beyond the 5 MiB that a partition keeps.
    let mut state = 1u64;
    for _ in 0..300 {
        let payload: Vec<u8> = (0..8192)
            .flat_map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                state.to_le_bytes()
            })
            .collect();
        let to = Destination { topic: &topics.telemetry, partition: 0 };
        writer.send(to, b"k", Some(&payload), &[], |_| {}).expect("accepted");
    }
    writer.flush(Duration::from_secs(60)).expect("acknowledged");
    let (low, _) = offsets(&broker.bootstrap(), &topics.telemetry, 1).expect("offsets")[0];
    assert!(low > 0, "the broker has dropped nothing: this proves nothing");
    let start = |offset| [Start { topic: topics.telemetry.clone(), partition: 0, offset }];
    let refused = Reader::open(&broker.bootstrap(), &start(0)).err().expect("refused");
    assert!(refused.message.contains("retention overtook this reader"), "{refused}");
    assert!(Reader::open(&broker.bootstrap(), &start(low)).is_ok());
}
