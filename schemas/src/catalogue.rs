use crate::record::{EventKind, Severity};
pub struct Advice { pub name: String, pub severity: Severity, pub ladder: Vec<String> }
pub fn advice(_: EventKind, _: Option<i32>, _: &str) -> Advice { Advice { name: String::new(), severity: Severity::Critical, ladder: vec![] } }
