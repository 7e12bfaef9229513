//! All roles in one process: what the demo, `import` and the tests start.
//!
//! [`pipeline`] runs a source through publisher, detection and archive into a lake, on the embedded broker or a real
//! one; [`demo`] and [`import`] are faces of it. It decides nothing that a role decides.

pub mod broker;
pub mod demo;
pub mod import;
pub mod judge;
pub mod pipeline;
pub mod view;
