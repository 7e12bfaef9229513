//! What the measurements share: one simulated [`fleet`], and its records in other wire [`layouts`].
//!
//! Takes the rooms as they are and gives them the same records each time. It judges nothing: tests do.

pub mod fleet;
pub mod layouts;
