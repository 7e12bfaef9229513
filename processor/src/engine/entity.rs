//! Who the facts are about: the GPUs and hosts of one partition, numbered in the order in which they first appear.

use std::collections::BTreeMap;

use gpufleet_schemas::record::{GpuBatch, GpuBlock, Labels};
use serde::{Deserialize, Serialize};

/// Number of a GPU within its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GpuId(u32);

impl GpuId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What an incident says about whom it concerns; as the newest record in the log has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entity {
    pub host: String,
    pub site: Option<String>,
    pub rack: Option<String>,
    pub gpu_uuid: Option<String>,
    pub gpu_index: Option<i32>,
    pub pci: Option<String>,
    pub job_id: Option<String>,
    /// A power domain, which no single host stands for.
    pub feed: Option<String>,
}

impl Entity {
    pub fn of_host(host: &str, labels: &Labels) -> Entity {
        Entity { host: host.to_owned(), site: labels.site.clone(), rack: labels.rack.clone(), ..Entity::default() }
    }

    /// For a person: `GPU 3 of node-07`.
    pub fn text(&self) -> String {
        if let Some(feed) = &self.feed {
            return format!("feed {feed}");
        }
        match (&self.gpu_index, &self.gpu_uuid, &self.pci) {
            (Some(index), _, _) => format!("GPU {index} of {}", self.host),
            (None, Some(uuid), _) => format!("{uuid} of {}", self.host),
            (None, None, Some(pci)) => format!("the device at {pci} of {}", self.host),
            (None, None, None) => self.host.clone(),
        }
    }
}

/// The GPUs of a partition.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Entities {
    by_uuid: BTreeMap<String, GpuId>,
    by_slot: BTreeMap<(String, String), GpuId>,
    gpus: Vec<Entity>,
}

impl Entities {
    /// The GPU of a block, with its labels brought up to date.
    pub fn observe(&mut self, batch: &GpuBatch, block: &GpuBlock) -> GpuId {
        let id = match self.by_uuid.get(block.gpu_uuid.as_str()) {
            Some(id) => *id,
            None => {
                let id = GpuId(u32::try_from(self.gpus.len()).unwrap_or(u32::MAX));
                self.by_uuid.insert(block.gpu_uuid.clone(), id);
                self.gpus.push(Entity { gpu_uuid: Some(block.gpu_uuid.clone()), ..Entity::default() });
                id
            }
        };
        let gpu = &mut self.gpus[id.index()];
        let moved = gpu.pci != block.pci || gpu.host != batch.origin.host;
        if moved || gpu.job_id != block.job_id || gpu.gpu_index != block.gpu_index || gpu.rack != batch.labels.rack {
            gpu.host.clone_from(&batch.origin.host);
            gpu.site.clone_from(&batch.labels.site);
            gpu.rack.clone_from(&batch.labels.rack);
            gpu.gpu_index = block.gpu_index;
            gpu.pci.clone_from(&block.pci);
            gpu.job_id.clone_from(&block.job_id);
            if let Some(pci) = block.pci.clone().filter(|_| moved) {
                self.by_slot.insert((batch.origin.host.clone(), pci), id);
            }
        }
        id
    }

    /// The GPU in a slot of a host, as batches have shown it.
    pub fn in_slot(&self, host: &str, pci: &str) -> Option<&Entity> {
        self.by_slot.get(&(host.to_owned(), pci.to_owned())).map(|id| &self.gpus[id.index()])
    }

    pub fn by_uuid(&self, uuid: &str) -> Option<&Entity> {
        self.by_uuid.get(uuid).map(|id| &self.gpus[id.index()])
    }

    pub fn get(&self, id: GpuId) -> &Entity {
        &self.gpus[id.index()]
    }

    pub fn len(&self) -> usize {
        self.gpus.len()
    }

    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty()
    }

    pub fn ids(&self) -> impl Iterator<Item = GpuId> + use<> {
        (0..u32::try_from(self.gpus.len()).unwrap_or(u32::MAX)).map(GpuId)
    }
}
