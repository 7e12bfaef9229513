//! Encode, decode and detect, for regressions: `cargo bench -p gpufleet-benches`.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gpufleet_benches::fleet::Fleet;
use gpufleet_processor::detect::task::WANTED;
use gpufleet_processor::detect::{DetectorsConfig, Task};
use gpufleet_processor::engine::book::TaskId;
use gpufleet_schemas::wire::{Decoder, Encoder};

fn pipeline(criterion: &mut Criterion) {
    let fleet = Fleet::simulate(20).expect("the simulator reads nothing that could fail");
    let mut group = criterion.benchmark_group("pipeline");
    group.throughput(Throughput::Elements(fleet.samples as u64)).sample_size(30);

    let (encoder, mut out) = (Encoder::default(), Vec::new());
    group.bench_function("encode", |bencher| {
        bencher.iter(|| {
            for record in &fleet.records {
                encoder.telemetry(record, &mut out);
                black_box(&out);
            }
        });
    });

    for (name, mut decoder) in [("decode_all", Decoder::default()), ("decode_wanted", Decoder::wanting(WANTED))] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for payload in &fleet.payloads {
                    black_box(decoder.telemetry(payload).expect("our own records can be read"));
                }
            });
        });
    }

    let config = DetectorsConfig::default();
    let id = TaskId { log_id: "bench".to_owned(), topic: "gpu.telemetry".to_owned(), partition: 0 };
    group.bench_function("detect", |bencher| {
        bencher.iter(|| {
            let (mut task, mut incidents) = (Task::new(id.clone(), &config), Vec::new());
            for (offset, payload) in (0..).zip(&fleet.payloads) {
                task.step(offset, payload, &mut incidents);
            }
            incidents.len()
        });
    });
    group.finish();
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
