//! `ps --lazy`: shows the progress of the devices of lazily mounted images.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use image::lazy::hot::BLOCK;
use serde::Serialize;
use serve::lazy::{
    DeviceStatus, LastFailure, LazyCounts, LazyFailures, LazyService, device_metrics, folder_of,
    log_of,
};
use store::{OpenImage, Store};

use crate::Answer;
use crate::output::report::{self, Bytes};
use crate::output::table;
use crate::session::context::Context;

/// One lazy device that is in use.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct LazyDeviceReport {
    /// Id of the device.
    device: String,
    /// Names of the images that have the device; empty if all their names were removed or moved.
    images: Vec<String>,
    /// Digest of the layer from which the device is filled.
    blob: String,
    /// Size of the device.
    bytes: Bytes,
    /// Bytes of the device that are downloaded and verified.
    filled: Bytes,
    /// Bytes of the layer that were fetched since the service began.
    fetched: Bytes,
    /// Part of `fetched` that was fetched before a program needed it.
    fetched_ahead: Bytes,
    /// Bytes of the device that programs waited for, because neither the hot pack nor an earlier request had them.
    needed: Bytes,
    /// Bytes of the device that were prefetched, which means before a program needed them.
    prefetched: Bytes,
    /// Part of `prefetched` that no program has read so far.
    wasted: Bytes,
    /// Bytes of the device that an earlier service had filled.
    reused: Bytes,
    /// Whether the device is mounted or open.
    mounted: bool,
    /// Whether the whole device is being fetched, also the parts that no program reads.
    completing: bool,
    /// Bytes of the device that were fetched to complete it.
    completed: Bytes,
    /// Number of requests for parts of the layer.
    requests: u64,
    /// Reads that reached the service, because the kernel did not have the bytes in memory.
    reads: u64,
    /// Reads that are waiting now.
    waiting: u64,
    /// Reads that had to wait, and no longer wait.
    waits: u64,
    /// Median of the waits, in milliseconds. Null if no read has waited, or if the median is above 30 seconds.
    wait_median: Option<f64>,
    /// 99th percentile of the waits, in milliseconds. Null like `waitMedian`.
    wait_p99: Option<f64>,
    /// Reads that got an I/O error.
    failures: u64,
    /// Reads that got an I/O error, by cause.
    failures_by_cause: FailuresReport,
    /// Last error of the store's disk since it stored a part of the device. Null if there is none.
    disk_error: Option<String>,
    /// Cause of the last I/O error of a read. Null if there was none.
    last_failure: Option<String>,
    /// Seconds since the last I/O error of a read. Null if there was none.
    last_failure_age: Option<u64>,
    /// Why all reads of the device get I/O errors, until its image is unmounted. Null if they do not.
    broken: Option<String>,
    /// Bytes of the device that came with the hot pack of its image.
    hot: Bytes,
    /// Part of `hot` that programs have read. Blocks of 16 KiB count as a whole.
    hot_read: Bytes,
    /// Part of `hot` that no program has read so far.
    hot_wasted: Bytes,
    /// Manifest of the version of the image whose start was prefetched, because the image has neither a hot pack nor a
    /// trace. Null if there was none.
    start_of: Option<String>,
}

/// Reads that got an I/O error, by cause.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FailuresReport {
    /// Every source failed to deliver the bytes.
    source: u64,
    /// The bytes did not match the digests of the index, or the index cannot inflate them.
    bytes: u64,
    /// The disk of the store failed.
    disk: u64,
    /// The bytes failed a moment before, and were not requested again.
    denied: u64,
    /// Every source was silent for too long.
    silent: u64,
}

impl From<LazyFailures> for FailuresReport {
    fn from(failures: LazyFailures) -> Self {
        let LazyFailures { source, bytes, disk, denied, silent } = failures;
        Self { source, bytes, disk, denied, silent }
    }
}

impl LazyDeviceReport {
    fn from_status(status: &DeviceStatus, names: &Names) -> Self {
        let counts = &status.counts;
        let of_units = |units: u64| Bytes(units.saturating_mul(image::lazy::UNIT));
        let millis = |in_a_thousand| {
            let micros = u32::try_from(counts.wait_of(in_a_thousand)?).ok()?;
            Some(f64::from(micros) / 1000.0)
        };
        Self {
            device: status.device.clone(),
            images: names.images_of(&status.device).to_vec(),
            blob: status.blob.clone(),
            bytes: Bytes(status.bytes),
            // The last unit may be short.
            filled: Bytes(of_units(status.filled).0.min(status.bytes)),
            fetched: Bytes(counts.fetched),
            fetched_ahead: Bytes(counts.fetched_ahead),
            needed: of_units(counts.wanted_units),
            prefetched: of_units(counts.ahead_units),
            wasted: Bytes(counts.wasted()),
            reused: of_units(counts.recalled_units),
            mounted: status.is_mounted,
            completing: status.is_completing,
            completed: of_units(counts.completed_units),
            requests: counts.requests,
            waits: counts.waits,
            wait_median: millis(500),
            wait_p99: millis(990),
            reads: counts.reads,
            waiting: counts.waiting,
            failures: counts.failures,
            failures_by_cause: counts.failures_by_cause.into(),
            disk_error: status.disk_error.clone(),
            last_failure: status.last_failure.as_ref().map(|it| it.cause.clone()),
            last_failure_age: status.last_failure.as_ref().map(|it| it.age / 1000),
            broken: status.broken.clone(),
            hot: Bytes(counts.hot_blocks * BLOCK),
            hot_read: Bytes(counts.hot_read_blocks * BLOCK),
            hot_wasted: Bytes(counts.hot_wasted()),
            start_of: status.start_of.as_ref().map(ToString::to_string),
        }
    }

    /// Returns the first image's name, and the number of further images.
    fn image(&self) -> String {
        match &self.images[..] {
            [] => "-".to_owned(),
            [one] => one.clone(),
            [one, others @ ..] => format!("{one} +{}", others.len()),
        }
    }

    fn row(&self) -> Vec<String> {
        let millis = |it: Option<f64>| it.map_or_else(|| "-".to_owned(), |it| format!("{it} ms"));
        vec![
            report::short(&self.device),
            self.image(),
            if self.mounted { "yes" } else { "no" }.to_owned(),
            report::size(self.bytes.0),
            report::size(self.filled.0),
            report::size(self.fetched.0),
            self.requests.to_string(),
            self.waits.to_string(),
            millis(self.wait_median),
            millis(self.wait_p99),
            self.failures.to_string(),
        ]
    }
}

/// Lists the devices that the service of a store fills; the list is empty if no service is running.
pub(crate) fn list(context: &Context, store: &Store, metrics: bool) -> anyhow::Result<Answer> {
    let folder = folder_of(store.path())?;
    let service = LazyService::connect(&folder)?;
    let found = match &service {
        Some(service) => service.status()?,
        None => Vec::new(),
    };
    let names = if found.is_empty() { Names::default() } else { Names::of_devices(store)? };
    if metrics {
        let text = device_metrics(service.is_some(), &found, |it| names.images_of(it));
        report::line(text.trim_end())?;
        return Ok(Answer::Yes);
    }
    if service.is_none() {
        let log = log_of(&folder);
        let last = match log.exists() {
            true => format!("; the messages of the last service are in {}", log.display()),
            false => String::new(),
        };
        context.remark(&format!(
            "no service fills lazy devices of this store: start one with `quire serve \
            --lazy`{last}"
        ));
    }
    for DeviceStatus { device, disk_error, .. } in &found {
        if let Some(error) = disk_error {
            let device = report::short(device);
            context
                .remark(&format!("the disk of the store refuses data of device {device}: {error}"));
        }
    }
    for status in &found {
        tell_failure(context, status);
    }
    if let Some(packs) = HotPacks::of(&found) {
        context.remark(&packs.to_string());
    }
    let all: Vec<_> = found.iter().map(|it| LazyDeviceReport::from_status(it, &names)).collect();
    report::print(context.json, &all, |all, out| {
        let titles = [
            "DEVICE", "IMAGE", "MOUNTED", "SIZE", "HERE", "FETCHED", "REQUESTS", "WAITS", "MEDIAN",
            "P99", "FAILURES",
        ];
        let rows: Vec<_> = all.iter().map(LazyDeviceReport::row).collect();
        table::print(out, &titles, &rows, &[])
    })?;
    Ok(Answer::Yes)
}

/// How useful the hot packs of some devices were.
#[derive(Debug, PartialEq, Eq)]
struct HotPacks {
    /// Bytes of packs that programs have read.
    read: u64,
    /// Bytes of the same devices that programs waited for.
    missed: u64,
    /// Bytes of packs that no program has read.
    wasted: u64,
}

impl HotPacks {
    /// Returns `None` if no device has blocks of a hot pack.
    fn of(devices: &[DeviceStatus]) -> Option<Self> {
        let with_pack = || devices.iter().map(|it| &it.counts).filter(|it| it.hot_blocks > 0);
        let sum = |bytes: fn(&LazyCounts) -> u64| with_pack().map(bytes).sum();
        with_pack().next().map(|_| Self {
            read: sum(|it| it.hot_read_blocks.saturating_mul(BLOCK)),
            missed: sum(|it| it.wanted_units.saturating_mul(image::lazy::UNIT)),
            wasted: sum(LazyCounts::hot_wasted),
        })
    }
}

impl std::fmt::Display for HotPacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [read, missed, wasted] = [self.read, self.missed, self.wasted].map(report::size);
        write!(f, "hot packs: {read} read, {missed} missed, {wasted} wasted")
    }
}

/// Prints the cause of the last I/O error of a device, and why all of its reads fail.
fn tell_failure(context: &Context, status: &DeviceStatus) {
    if let Some(cause) = &status.broken {
        let device = report::short(&status.device);
        context.remark(&format!(
            "all reads of device {device} get I/O errors until its image is unmounted: {cause}"
        ));
    }
    if let Some(LastFailure { cause, .. }) = &status.last_failure {
        let device = report::short(&status.device);
        context.remark(&format!("a read of device {device} got an I/O error: {cause}"));
    }
}

/// How long `run` waits at its end for the service's answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The lazy devices of a container, and the folder of the service that fills them.
#[derive(Debug)]
pub(crate) struct LazyRun {
    folder: PathBuf,
    devices: Vec<String>,
}

impl LazyRun {
    /// Returns `None` if the service fills no device of the image.
    pub(crate) fn of(store: &Store, image: &OpenImage) -> anyhow::Result<Option<Self>> {
        let lent = image.devices.iter().filter(|it| it.is_lent);
        let devices: Vec<_> = lent.map(|it| it.id.to_string()).collect();
        if devices.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { folder: folder_of(store.path())?, devices }))
    }

    /// Prints the causes of I/O errors that readers of the devices got since a time. Does nothing if the causes cannot
    /// be determined, because the program's own result matters more.
    pub(crate) fn tell_failures(&self, context: &Context, since: Instant) {
        if context.is_quiet() {
            return;
        }
        match self.status() {
            Ok(found) => {
                let is_recent =
                    |it: &LastFailure| u128::from(it.age) <= since.elapsed().as_millis();
                let failed = |it: &&DeviceStatus| {
                    it.broken.is_some() || it.last_failure.as_ref().is_some_and(is_recent)
                };
                found.iter().filter(failed).for_each(|it| tell_failure(context, it));
                if let Some(packs) = HotPacks::of(&found) {
                    tracing::info!("{packs}");
                }
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::debug!(error, "cannot determine the causes of I/O errors");
            }
        }
    }

    fn status(&self) -> anyhow::Result<Vec<DeviceStatus>> {
        let Some(service) = LazyService::connect(&self.folder)? else { return Ok(Vec::new()) };
        let mut found = service.with_patience(PATIENCE)?.status()?;
        found.retain(|it| self.devices.contains(&it.device));
        Ok(found)
    }
}

/// Names of images, by the ids of their lazy devices.
#[derive(Debug, Default)]
struct Names(BTreeMap<String, Vec<String>>);

impl Names {
    /// Returns the names of all images of a store. An image that cannot be read is left out.
    fn of_devices(store: &Store) -> anyhow::Result<Self> {
        let mut names = Self::default();
        for (name, reference) in store.refs.readable()?.0 {
            for device in store.lazy_devices(&reference.image).unwrap_or_default() {
                names.0.entry(device.to_string()).or_default().push(name.to_string());
            }
        }
        Ok(names)
    }

    fn images_of(&self, device: &str) -> &[String] {
        self.0.get(device).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_packs_are_one_line() {
        let [mut one, mut other, mut without] = [(); 3].map(|()| DeviceStatus::default());
        without.counts = LazyCounts { wanted_units: 9, ..LazyCounts::default() };
        assert_eq!(HotPacks::of(&[]), None);
        assert_eq!(HotPacks::of(std::slice::from_ref(&without)), None);
        one.counts.hot_blocks = 128;
        one.counts.hot_read_blocks = 64;
        one.counts.wanted_units = 16;
        other.counts.hot_blocks = 64;
        let packs = HotPacks::of(&[one, without, other]).unwrap();
        let expected = HotPacks { read: 1 << 20, missed: 1 << 20, wasted: 2 << 20 };
        assert_eq!(packs, expected);
        assert_eq!(packs.to_string(), "hot packs: 1.00 MiB read, 1.00 MiB missed, 2.00 MiB wasted");
    }
}
