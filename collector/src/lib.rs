//! The collector: what GPUs and kernels say, to the broker.
//!
//! Takes NVML, kernel logs, nvidia-smi logs or a simulated fleet, gives records on the telemetry topic. It decides
//! nothing about health and reads nothing back from the broker.

pub mod cli;
pub mod kernel_log;
pub mod publisher;
pub mod simulator;
pub mod source;
pub mod text;
