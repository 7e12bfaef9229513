use super::*;
use crate::engine::Entity;
use crate::engine::finding::Offsets;

const SPANS: Spans = Spans { flap_guard: 30, cause_window: 20, tombstone_after: 1000 };

fn finding(onset_at: i64, end_at: Option<i64>, severity: Severity, count: i64) -> Finding {
    Finding {
        kind: "thermal_throttle",
        cause: None,
        subject: "GPU-1".into(),
        facet: String::new(),
        entity: Entity { host: "node".into(), gpu_uuid: Some("GPU-1".into()), ..Entity::default() },
        severity,
        onset_at,
        end_at,
        late: false,
        code: None,
        statistic: "",
        value: 0.0,
        threshold: 0.0,
        count,
        summary: "hot".into(),
        actions: Vec::new(),
        evidence: Vec::new(),
        coverage: None,
        raw: None,
        offsets: Offsets::default(),
    }
}

fn caused(kind: &'static str, onset_at: i64, end_at: Option<i64>, severity: Severity) -> Finding {
    Finding { kind, cause: Some("memory"), ..finding(onset_at, end_at, severity, 1) }
}

fn book() -> Book {
    Book::new(TaskId { log_id: "l".into(), topic: "t".into(), partition: 0 }, SPANS)
}

#[test]
fn an_incident_opens_gets_worse_and_resolves_and_repeats_say_nothing() {
    let mut book = book();
    let opened = book.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
    assert_eq!((opened.revision, opened.state, book.open_count()), (0, State::Open, 1));
    assert!(book.record(finding(10, None, Severity::Warning, 1), 12).is_none());
    let worse = book.record(finding(10, None, Severity::Critical, 1), 13).expect("worse");
    assert_eq!((&worse.id, worse.revision, worse.severity), (&opened.id, 1, Severity::Critical));
    let resolved = book.record(finding(10, Some(20), Severity::Critical, 1), 50).expect("resolves");
    assert_eq!((resolved.state, resolved.end_at, resolved.severity), (State::Resolved, Some(20), Severity::Critical));
    assert!(book.record(finding(10, Some(20), Severity::Critical, 1), 60).is_none());
    assert_eq!(book.open_count(), 0);
}

#[test]
fn a_relapse_within_the_flap_guard_reopens_and_a_later_one_is_a_new_incident() {
    let mut book = book();
    let first = book.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
    book.record(finding(10, Some(20), Severity::Warning, 1), 30).expect("resolves");
    let again = book.record(finding(40, None, Severity::Warning, 1), 41).expect("reopens");
    assert_eq!((&again.id, again.onset_at, again.revision, again.state), (&first.id, 10, 2, State::Open));
    assert!(book.record(finding(10, Some(20), Severity::Warning, 1), 42).is_none(), "the old episode is over");
    book.record(finding(40, Some(50), Severity::Warning, 1), 60).expect("resolves again");
    let new = book.record(finding(81, None, Severity::Warning, 1), 82).expect("opens");
    assert!(new.id != first.id && new.revision == 0);
}

#[test]
fn late_records_may_lower_the_severity_of_an_episode_but_not_that_of_an_earlier_one() {
    let mut book = book();
    book.record(finding(10, None, Severity::Critical, 1), 11).expect("opens");
    let lower = book.record(finding(10, None, Severity::Warning, 1), 12).expect("is judged anew");
    assert_eq!((lower.severity, lower.revision), (Severity::Warning, 1));
    book.record(finding(10, Some(20), Severity::Critical, 1), 30).expect("resolves");
    let again = book.record(finding(40, None, Severity::Warning, 1), 41).expect("reopens");
    assert_eq!(again.severity, Severity::Critical);
}

#[test]
fn a_storm_is_revised_by_powers_of_two() {
    let mut book = book();
    let revisions = (1..=1000)
        .filter(|count| book.record(finding(10, None, Severity::Major, *count), 10 + count).is_some())
        .count();
    assert_eq!(revisions, 10, "1, 2, 4, .. 512");
}

#[test]
fn an_earlier_fact_that_came_late_dates_the_incident_anew_under_its_id() {
    let mut book = book();
    let opened = book.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
    let moved = book.record(finding(7, None, Severity::Warning, 1), 12).expect("is dated anew");
    assert_eq!((&moved.id, moved.onset_at, moved.revision), (&opened.id, 7, 1));
}

#[test]
fn one_cause_is_one_page_and_what_it_explains_is_attached() {
    let mut book = book();
    let page = book.record(caused("xid", 10, None, Severity::Major), 11).expect("opens");
    let attached = book.record(caused("ecc_uncorrectable", 15, None, Severity::Critical), 16).expect("is attached");
    assert_eq!((&attached.id, attached.revision, attached.severity), (&page.id, 1, Severity::Critical));
    assert_eq!((attached.explains.len(), attached.explains[0].kind.as_str()), (1, "ecc_uncorrectable"));
    assert_eq!(attached.kind, "xid");
    let half = book.record(caused("xid", 10, Some(20), Severity::Major), 40).expect("a revision");
    assert_eq!(half.state, State::Open, "what is attached goes on");
    let over = book.record(caused("ecc_uncorrectable", 15, Some(30), Severity::Critical), 50).expect("resolves");
    assert_eq!((over.state, over.end_at), (State::Resolved, Some(30)));
    let other = book.record(caused("ecc_uncorrectable", 100, None, Severity::Critical), 101).expect("opens");
    assert_eq!((other.kind.as_str(), other.revision), ("ecc_uncorrectable", 0), "too long after to be of that cause");
}

#[test]
fn another_gpu_is_another_cause() {
    let mut book = book();
    book.record(caused("xid", 10, None, Severity::Major), 11).expect("opens");
    let mut elsewhere = caused("ecc_uncorrectable", 12, None, Severity::Critical);
    elsewhere.entity.gpu_uuid = Some("GPU-2".into());
    assert_eq!(book.record(elsewhere, 13).expect("opens").revision, 0);
}

#[test]
fn what_the_detector_no_longer_finds_is_withdrawn() {
    let mut book = book();
    let opened = book.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
    let mut revisions = Vec::new();
    book.withdraw(11, |kind| kind == "thermal_throttle", &mut revisions);
    book.withdraw(12, |kind| kind == "xid", &mut revisions);
    assert!(revisions.is_empty(), "it was heard, and then its detector said nothing at all");
    book.withdraw(12, |kind| kind == "thermal_throttle", &mut revisions);
    assert_eq!((&revisions[0].id, revisions[0].state, revisions[0].revision), (&opened.id, State::Resolved, 1));
    assert!(revisions[0].summary.starts_with("withdrawn: "));
    assert_eq!(book.open_count(), 0);
}

#[test]
fn a_resolved_incident_gets_one_tombstone_and_is_forgotten() {
    let mut book = book();
    let opened = book.record(finding(10, Some(20), Severity::Warning, 1), 30).expect("opens and resolves");
    assert!(book.sweep(1029).is_empty());
    assert_eq!(book.sweep(1030), [opened.id]);
    assert!(book.sweep(5000).is_empty() && book.pages().entries.is_empty());
}

#[test]
fn another_version_is_not_contradicted_with_the_same_revision_and_what_it_alone_found_is_taken_back() {
    let mut theirs = book();
    let both = theirs.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
    let both = Incident { revision: 4, ..both };
    let alone = Incident { id: "alone".into(), revision: 2, state: State::Open, decided_at: 12, ..both.clone() };
    let mut ours = book();
    ours.take_over(vec![both.clone(), alone]);
    let same = ours.record(finding(10, None, Severity::Warning, 1), 11).expect("opens");
    assert_eq!((&same.id, same.revision), (&both.id, 5));
    let mut revisions = Vec::new();
    ours.withdraw(12, |_| false, &mut revisions);
    assert!(revisions.is_empty(), "not before the log has come well past it");
    ours.withdraw(13 + TAKE_BACK_AFTER, |_| false, &mut revisions);
    assert_eq!(revisions.len(), 1);
    assert_eq!((revisions[0].id.as_str(), revisions[0].revision, revisions[0].state), ("alone", 3, State::Resolved));
}
