//! All metrics of a node: those of the engine's calls, of the store, and of lazy devices.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::any_error::AnyError;
use crate::lazy::{DeviceStatus, LazyService, LazyTotals, folder_of};
use crate::metrics::text::{head, sample};
use crate::snapshots::metrics::engine::snapshotter_metrics;
use crate::snapshots::metrics::store_use::StoreUse;
use crate::snapshots::snapshotter::Snapshotter;
use crate::unpoisoned::lock;

/// Timeout of the reply of the service for lazy devices.
const PATIENCE: Duration = Duration::from_secs(3);

/// The sources of the metrics.
pub(in crate::snapshots) struct NodeMetrics {
    snapshotter: Arc<Snapshotter>,
    store: StoreUse,
    lazy: Mutex<LazyTotals>,
}

impl NodeMetrics {
    pub(in crate::snapshots) fn new(snapshotter: Arc<Snapshotter>) -> Self {
        let store = StoreUse::new(&snapshotter.store);
        Self { snapshotter, store, lazy: Mutex::default() }
    }

    /// Returns the text of all metrics. It blocks for some seconds at most.
    pub(in crate::snapshots) fn text(&self) -> String {
        let instance = self.snapshotter.instance.name();
        let counts = self.snapshotter.counts.now(instance);
        let roots = self.snapshotter.mounted_kinds();
        let mut text = head("quire_build_info", "gauge", "The version of Quire.");
        let version = format!("version=\"{}\"", env!("CARGO_PKG_VERSION"));
        text += &sample("quire_build_info", &version, 1);
        text += &snapshotter_metrics(Some(&counts), roots.into_iter().map(|it| (instance, it)));
        text += &self.store.text((self.snapshotter.environment.now)().seconds);
        text + &self.lazy()
    }

    fn lazy(&self) -> String {
        let devices = self.devices().unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &*error;
            tracing::warn!(error, "no metrics of lazy devices");
            None
        });
        let mut totals = lock(&self.lazy);
        if let Some(devices) = &devices {
            totals.add(devices);
        }
        totals.text(devices.as_deref())
    }

    /// Returns the devices in use; `None` if no service fills lazy devices of the store.
    fn devices(&self) -> Result<Option<Vec<DeviceStatus>>, AnyError> {
        let folder = folder_of(self.snapshotter.store.path())?;
        let Some(service) = LazyService::connect(&folder)? else { return Ok(None) };
        Ok(Some(service.with_patience(PATIENCE)?.status()?))
    }
}
