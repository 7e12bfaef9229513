//! The streaming engine: event time, windows, reordering and the incident book.
//!
//! Takes decoded records in offset order and gives incidents. It knows no detector, no Kafka and no Delta. Time enters
//! as records only: whatever moves the watermark lies in the log.

pub mod book;
pub mod clock;
pub mod entity;
pub mod finding;
pub mod machine;
pub mod reorder;
pub mod window;

pub use book::Book;
pub use clock::{Ahead, Clock};
pub use entity::{Entities, Entity, GpuId};
pub use finding::Finding;
pub use machine::{Input, Machine, Output, Section, StateError};
pub use reorder::{Fold, Reorder};
pub use window::{Pane, Panes};
