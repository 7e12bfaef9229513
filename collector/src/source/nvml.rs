//! NVML: what a GPU says about itself, through nvml-wrapper. The only file that names it.
//!
//! Reads the main getters in this process and thread; a getter that a GPU does not support, or that fails, leaves its
//! metric absent, and the wrapper hides clocks event reasons that it does not know. A GPU that NVML calls lost is reported once and not read again.

use gpufleet_schemas::metric::{METRIC_COUNT, Metric, Tier};
use gpufleet_schemas::record::{GpuBlock, PowerKind};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;

use super::SourceError;

/// One value per metric; absent where this read has none.
pub type Readings = [Option<i64>; METRIC_COUNT];

/// The GPUs of this host.
pub struct Devices {
    nvml: Nvml,
    devices: Vec<Known>,
    driver_version: Option<String>,
}

struct Known {
    index: u32,
    block: GpuBlock,
    lost: bool,
}

/// What a read found out besides its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Fine,
    /// NVML says that the GPU is lost, for the first time.
    Lost,
    /// It said so before: there is nothing to read.
    Gone,
}

impl Devices {
    /// Loads the driver's library and lists the GPUs.
    pub fn open() -> Result<Devices, SourceError> {
        let nvml = Nvml::init().map_err(|error| SourceError::NoNvml(advice(&error)))?;
        let count = nvml.device_count().map_err(|error| SourceError::NoNvml(error.to_string()))?;
        let driver_version = nvml.sys_driver_version().ok();
        let devices: Vec<Known> = (0..count).filter_map(|index| identify(&nvml, index)).collect();
        if devices.is_empty() {
            return Err(SourceError::NoNvml("the driver is loaded but lists no GPU; see `nvidia-smi -L`".to_owned()));
        }
        Ok(Devices { nvml, devices, driver_version })
    }

    pub fn driver_version(&self) -> Option<String> {
        self.driver_version.clone()
    }

    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// The identity of the `i`-th GPU, as an empty block.
    pub fn block(&self, i: usize) -> &GpuBlock {
        &self.devices[i].block
    }

    /// Reads one tier of the `i`-th GPU into `values`.
    pub fn read(&mut self, i: usize, tier: Tier, values: &mut Readings) -> Health {
        let known = &mut self.devices[i];
        if known.lost {
            return Health::Gone;
        }
        let Ok(device) = self.nvml.device_by_index(known.index) else { return Health::Fine };
        let mut lost = false;
        let mut put = |metric: Metric, value: Result<i64, NvmlError>| match value {
            Ok(value) => values[metric.index()] = Some(value),
            Err(NvmlError::GpuLost) => lost = true,
            Err(_) => {}
        };
        match tier {
            Tier::Fast => {
                put(Metric::PowerDraw, device.power_usage().map(i64::from));
                put(Metric::ClockSm, device.clock_info(Clock::SM).map(i64::from));
                put(Metric::ClockMemory, device.clock_info(Clock::Memory).map(i64::from));
                put(
                    Metric::ClocksEventReasons,
                    device.current_throttle_reasons().map(|reasons| reasons.bits().cast_signed()),
                );
            }
            Tier::Slow => {
                put(Metric::TemperatureGpu, device.temperature(TemperatureSensor::Gpu).map(i64::from));
                let utilization = device.utilization_rates();
                put(Metric::UtilizationGpu, utilization.as_ref().map(|u| i64::from(u.gpu)).map_err(clone_error));
                put(Metric::UtilizationMemory, utilization.as_ref().map(|u| i64::from(u.memory)).map_err(clone_error));
                let memory = device.memory_info();
                put(Metric::MemoryUsed, memory.as_ref().map(|m| m.used.cast_signed()).map_err(clone_error));
                put(Metric::MemoryTotal, memory.as_ref().map(|m| m.total.cast_signed()).map_err(clone_error));
                put(Metric::PowerLimit, device.enforced_power_limit().map(i64::from));
                put(Metric::Energy, device.total_energy_consumption().map(u64::cast_signed));
                put(Metric::FanSpeed, device.fan_speed(0).map(i64::from));
                put(Metric::PerformanceState, device.performance_state().map(|state| i64::from(state as u32)));
            }
            Tier::Health => {
                let ecc = |error, counter| device.total_ecc_errors(error, counter).map(u64::cast_signed);
                put(Metric::EccSbeVolatile, ecc(MemoryError::Corrected, EccCounter::Volatile));
                put(Metric::EccDbeVolatile, ecc(MemoryError::Uncorrected, EccCounter::Volatile));
                put(Metric::EccSbeAggregate, ecc(MemoryError::Corrected, EccCounter::Aggregate));
                put(Metric::EccDbeAggregate, ecc(MemoryError::Uncorrected, EccCounter::Aggregate));
                put(Metric::PcieReplayCount, device.pcie_replay_counter().map(i64::from));
                put(Metric::PcieLinkGen, device.current_pcie_link_gen().map(i64::from));
                put(Metric::PcieLinkWidth, device.current_pcie_link_width().map(i64::from));
            }
        }
        known.lost = lost;
        if lost { Health::Lost } else { Health::Fine }
    }
}

/// Two metrics come from one call; what matters of its error is only whether the GPU is lost.
fn clone_error(error: &NvmlError) -> NvmlError {
    if matches!(error, NvmlError::GpuLost) { NvmlError::GpuLost } else { NvmlError::NotSupported }
}

fn identify(nvml: &Nvml, index: u32) -> Option<Known> {
    let device = nvml.device_by_index(index).ok()?;
    let pci = device.pci_info().ok().map(|pci| format!("{:08x}:{:02x}:{:02x}", pci.domain, pci.bus, pci.device));
    let block = GpuBlock {
        gpu_uuid: device.uuid().ok()?,
        gpu_index: i32::try_from(index).ok(),
        pci,
        model: device.name().ok(),
        // `nvmlDeviceGetPowerUsage` is a one-second mean on Ampere and later, except GA100, and instant before: the
        // instant and average fields come with the raw field reader.
        power_kind: PowerKind::Unknown,
        ..GpuBlock::default()
    };
    Some(Known { index, block, lost: false })
}

/// What to do about a library that does not load.
fn advice(error: &NvmlError) -> String {
    let what = match error {
        NvmlError::LibloadingError(_) => {
            "libnvidia-ml.so.1 is not here: install the NVIDIA driver, or mount it into the container".to_owned()
        }
        NvmlError::DriverNotLoaded => {
            "the NVIDIA kernel module is not loaded: see `lsmod | grep nvidia` and the kernel log".to_owned()
        }
        NvmlError::LibRmVersionMismatch => {
            "the driver was upgraded under a loaded module: reload it or reboot".to_owned()
        }
        other => other.to_string(),
    };
    format!("{what}. Recordings need no GPU: gpufleet-collector publish FILE")
}
