use gpufleet_schemas::record::{Partial, State, Topology, Watermark};

use super::*;

const START: i64 = 1_772_442_000 * SECOND;

/// Stage 1 as two tasks that tell stage 2 of one feed with two hosts; the log stamps what it takes.
struct Upper {
    task: GroupTask,
    numbers: BTreeMap<&'static str, i64>,
    offset: i64,
    outputs: Vec<Output>,
}

impl Upper {
    fn new() -> Upper {
        let id = TaskId { log_id: "log".into(), topic: "fleet.partials".into(), partition: 0 };
        let upstream = ["a".to_owned(), "b".to_owned()];
        let task = GroupTask::new(id, upstream, &DetectorsConfig::default());
        let mut upper = Upper { task, numbers: BTreeMap::new(), offset: 0, outputs: Vec::new() };
        let hosts = vec!["host-a".to_owned(), "host-b".to_owned()];
        let group = Group { kind: GroupKind::PowerDomain, key: "north/A".into(), hosts, rating_watts: Some(1000) };
        let topology = Topology { epoch_at: START, writer: "test".into(), groups: vec![group] };
        let emit_seq = upper.number("a");
        upper.take(START, Upstream::Topology { task: "a".into(), emit_seq, topology });
        upper
    }

    fn number(&mut self, task: &'static str) -> i64 {
        let number = self.numbers.entry(task).or_insert(-1);
        *number += 1;
        *number
    }

    fn take(&mut self, appended_at: i64, record: Upstream) {
        self.task.take(self.offset, Some(appended_at), &record, &mut self.outputs);
        self.offset += 1;
    }

    /// What a task of stage 1 says when its watermark has come to `second`: its host drew so many watts in the pane before.
    fn says(&mut self, task: &'static str, second: i64, watts: i64) {
        let at = START + second * SECOND;
        if second % 5 == 0 {
            let emit_seq = self.number(task);
            let partial = Partial {
                task: task.into(),
                emit_seq,
                group: GroupKind::PowerDomain,
                key: "north/A".into(),
                host: format!("host-{task}"),
                pane_at: at - 5 * SECOND,
                milliwatts: vec![Some(watts * 1000); 5],
                ..Partial::default()
            };
            self.take(at, Upstream::Partial(partial));
        }
        let emit_seq = self.number(task);
        self.take(at, Upstream::Watermark(Watermark { task: task.into(), emit_seq, watermark_at: at }));
    }

    fn incidents(&self) -> Vec<(State, i64, f64)> {
        let incident = |output: &Output| match output {
            Output::Incident(incident) => {
                let second = (incident.decided_at - START) / SECOND;
                Some((incident.state, second, incident.coverage.unwrap_or(-1.0)))
            }
            _ => None,
        };
        self.outputs.iter().filter_map(incident).collect()
    }

    fn exclusions(&self) -> Vec<Upstream> {
        let exclusion = |output: &Output| match output {
            Output::Itself(record) => Some(record.clone()),
            _ => None,
        };
        self.outputs.iter().filter_map(exclusion).collect()
    }
}

#[test]
fn a_feed_opens_when_all_its_tasks_have_come_there_and_resolves_when_its_load_is_gone() {
    let mut upper = Upper::new();
    for second in 1..=120 {
        let watts = if second <= 60 { 520 } else { 300 };
        upper.says("a", second, watts);
        upper.says("b", second, watts);
    }
    assert_eq!(upper.incidents(), [(State::Open, 15, 1.0), (State::Resolved, 120, 1.0)]);
    assert!(upper.exclusions().is_empty());
}

#[test]
fn what_a_task_sends_again_is_dropped() {
    let mut upper = Upper::new();
    for second in 1..=20 {
        upper.says("a", second, 520);
        upper.says("b", second, 520);
    }
    let before = upper.incidents();
    upper.numbers.insert("a", 3);
    for second in 3..=20 {
        upper.says("a", second, 5000);
    }
    assert_eq!(upper.incidents(), before);
    assert!(upper.task.counts().duplicates > 10);
}

#[test]
fn a_silent_task_is_excluded_by_a_record_and_waited_for_again_when_it_speaks() {
    let mut upper = Upper::new();
    for second in 1..=10 {
        upper.says("a", second, 1100);
        upper.says("b", second, 0);
    }
    for second in 11..=24 {
        upper.says("a", second, 1100);
    }
    assert!(upper.exclusions().is_empty(), "it may still come");
    assert!(upper.incidents().is_empty(), "the time of stage 2 is that of the slowest");
    for second in 25..=30 {
        upper.says("a", second, 1100);
    }
    let exclusions = upper.exclusions();
    assert_eq!(exclusions.len(), 1, "it is asked for once");
    assert!(upper.incidents().is_empty(), "it takes effect when it is read back");
    upper.take(START + 30 * SECOND, exclusions[0].clone());
    assert_eq!(upper.incidents(), [(State::Open, 30, 1.0)], "opened on panes of both");
    for second in 31..=80 {
        upper.says("a", second, 100);
    }
    assert_eq!(upper.incidents().len(), 1, "half of the hosts are not heard: it cannot tell that it is over");
    upper.says("b", 81, 0);
    upper.says("a", 82, 100);
    assert_eq!(upper.task.seen.advanced_to, Some(START + 81 * SECOND), "it is waited for again");
}

#[test]
fn nobody_was_silent_while_the_whole_log_stood_still() {
    let mut upper = Upper::new();
    upper.says("a", 1, 100);
    upper.says("b", 1, 100);
    upper.says("a", 3600, 100);
    upper.says("b", 3600, 100);
    upper.says("a", 3601, 100);
    assert!(upper.exclusions().is_empty());
}
