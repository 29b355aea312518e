//! Metrics of lazy devices for Prometheus: of each device, and sums without the names of devices.

use std::collections::BTreeMap;

use super::metrics::{LazyFailures, WAITS};
use super::wire::DeviceStatus;
use crate::metrics::text::{head, histogram, sample, single};

const UNIT: u64 = image::lazy::UNIT;

/// Returns a value of a device.
type Value = fn(&DeviceStatus) -> u64;

/// Values that can decrease: name, help and value of each.
const GAUGES: [(&str, &str, Value); 4] = [
    ("device_bytes", "Size of devices.", |it| it.bytes),
    ("filled_bytes", "Bytes of devices that are downloaded and verified.", |it| {
        it.filled.saturating_mul(UNIT).min(it.bytes)
    }),
    ("wasted_bytes", "Bytes of devices that were prefetched and never read.", |it| {
        it.counts.wasted()
    }),
    ("waiting_reads", "Reads that are waiting.", |it| it.counts.waiting),
];

/// Values that only increase.
const COUNTERS: [(&str, &str, Value); 8] = [
    ("fetched_bytes_total", "Bytes of layers that were fetched.", |it| it.counts.fetched),
    ("fetched_ahead_bytes_total", "Bytes of layers that were prefetched.", |it| {
        it.counts.fetched_ahead
    }),
    ("needed_bytes_total", "Bytes of devices that programs waited for.", |it| {
        it.counts.wanted_units.saturating_mul(UNIT)
    }),
    ("prefetched_bytes_total", "Bytes of devices that were prefetched.", |it| {
        it.counts.ahead_units.saturating_mul(UNIT)
    }),
    ("reused_bytes_total", "Bytes of devices that an earlier service downloaded.", |it| {
        it.counts.recalled_units.saturating_mul(UNIT)
    }),
    ("completed_bytes_total", "Bytes of devices that were downloaded to complete them.", |it| {
        it.counts.completed_units.saturating_mul(UNIT)
    }),
    ("requests_total", "Requests for parts of layers.", |it| it.counts.requests),
    ("reads_total", "Reads that reached the service.", |it| it.counts.reads),
];

/// Causes of I/O errors, as in [`LazyFailures`].
const CAUSES: [&str; 5] = ["source", "bytes", "disk", "denied", "silent"];

const UP: &str = "Whether a service fills the lazy devices of the store.";
const REFUSES: &str = "Whether the disk of the store refuses data of a device.";
const FAILURES: &str = "Reads that got an I/O error, by cause.";
const WAIT: &str = "How long reads waited.";

const fn failures(failures: &LazyFailures) -> [u64; CAUSES.len()] {
    let LazyFailures { source, bytes, disk, denied, silent } = *failures;
    [source, bytes, disk, denied, silent]
}

fn name(metric: &str) -> String {
    format!("quire_lazy_{metric}")
}

/// Returns the metrics of each device, with the names of its images. `is_served` is whether a service runs.
#[must_use]
pub fn device_metrics<'n>(
    is_served: bool,
    devices: &[DeviceStatus],
    images_of: impl Fn(&str) -> &'n [String],
) -> String {
    let mut text = single(&name("up"), "gauge", UP, u8::from(is_served));
    let label = |it: &DeviceStatus| format!("device=\"{}\"", it.device);
    let gauges = GAUGES.iter().map(|it| ("gauge", it));
    let counters = COUNTERS.iter().map(|it| ("counter", it));
    for (kind, (metric, help, value)) in gauges.chain(counters) {
        let metric = name(metric);
        text += &head(&metric, kind, help);
        devices.iter().for_each(|it| text += &sample(&metric, &label(it), value(it)));
    }
    text += &head(&name("device_info"), "gauge", "An image that has a device.");
    for device in devices {
        for image in images_of(&device.device) {
            let labels = format!("{},image=\"{image}\"", label(device));
            text += &sample(&name("device_info"), &labels, 1);
        }
    }
    text += &head(&name("disk_refuses"), "gauge", REFUSES);
    for device in devices {
        let refuses = u8::from(device.disk_error.is_some());
        text += &sample(&name("disk_refuses"), &label(device), refuses);
    }
    text += &head(&name("failures_total"), "counter", FAILURES);
    for device in devices {
        for (cause, value) in CAUSES.iter().zip(failures(&device.counts.failures_by_cause)) {
            let labels = format!("{},cause=\"{cause}\"", label(device));
            text += &sample(&name("failures_total"), &labels, value);
        }
    }
    text += &head(&name("wait_seconds"), "histogram", WAIT);
    for device in devices {
        let (counted, micros) = (&device.counts.wait_histogram, device.counts.wait_micros);
        text += &histogram(&name("wait_seconds"), &label(device), &WAITS, counted, micros);
    }
    text
}

/// Sums of the counters of all devices. They never decrease: a device that is no longer in use keeps its part.
#[derive(Debug, Default)]
pub struct LazyTotals {
    /// The last counters of the devices in use, by device.
    last: BTreeMap<String, Counted>,
    sum: Counted,
}

/// Counters of a device, or their sums.
#[derive(Debug, Clone, Default)]
struct Counted {
    counters: [u64; COUNTERS.len()],
    failures: [u64; CAUSES.len()],
    waits: [u64; WAITS.len() + 1],
    wait_micros: u64,
}

impl Counted {
    fn of(device: &DeviceStatus) -> Self {
        let counts = &device.counts;
        let mut waits = [0; WAITS.len() + 1];
        waits.iter_mut().zip(&counts.wait_histogram).for_each(|(it, count)| *it = *count);
        Self {
            counters: COUNTERS.map(|it| (it.2)(device)),
            failures: failures(&counts.failures_by_cause),
            waits,
            wait_micros: counts.wait_micros,
        }
    }

    fn values(&mut self) -> impl Iterator<Item = &mut u64> {
        let Self { counters, failures, waits, wait_micros } = self;
        let arrays = counters.iter_mut().chain(failures).chain(waits);
        arrays.chain(std::iter::once(wait_micros))
    }

    /// Adds the increase from `before` to `now`. A counter that has decreased belongs to another service, and began at
    /// zero.
    fn add(&mut self, mut before: Self, mut now: Self) {
        let changes = before.values().zip(now.values());
        for (sum, (before, now)) in self.values().zip(changes) {
            *sum = sum.saturating_add(now.checked_sub(*before).unwrap_or(*now));
        }
    }
}

impl LazyTotals {
    /// Adds the counters of the devices that are in use now.
    pub fn add(&mut self, devices: &[DeviceStatus]) {
        let mut last = BTreeMap::new();
        for device in devices {
            let (before, now) = (self.last.remove(&device.device), Counted::of(device));
            self.sum.add(before.unwrap_or_default(), now.clone());
            last.insert(device.device.clone(), now);
        }
        self.last = last;
    }

    /// Returns the metrics. `devices` are in use now, or `None` if no service runs.
    #[must_use]
    pub fn text(&self, devices: Option<&[DeviceStatus]>) -> String {
        let mut text = single(&name("up"), "gauge", UP, u8::from(devices.is_some()));
        let devices = devices.unwrap_or_default();
        let count = |is_so: fn(&&DeviceStatus) -> bool| devices.iter().filter(is_so).count();
        text += &single(&name("devices"), "gauge", "Devices in use.", devices.len());
        let broken = count(|it| it.broken.is_some());
        let help = "Devices of which all reads get I/O errors.";
        text += &single(&name("broken_devices"), "gauge", help, broken);
        let refuses = count(|it| it.disk_error.is_some());
        text += &single(&name("disk_refuses"), "gauge", REFUSES, refuses);
        for (metric, help, value) in GAUGES {
            let sum = devices.iter().map(value).fold(0, u64::saturating_add);
            text += &single(&name(metric), "gauge", help, sum);
        }
        for ((metric, help, _), sum) in COUNTERS.iter().zip(self.sum.counters) {
            text += &single(&name(metric), "counter", help, sum);
        }
        text += &head(&name("failures_total"), "counter", FAILURES);
        for (cause, sum) in CAUSES.iter().zip(self.sum.failures) {
            text += &sample(&name("failures_total"), &format!("cause=\"{cause}\""), sum);
        }
        text += &head(&name("wait_seconds"), "histogram", WAIT);
        let Counted { waits, wait_micros, .. } = &self.sum;
        text + &histogram(&name("wait_seconds"), "", &WAITS, waits, *wait_micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str) -> DeviceStatus {
        DeviceStatus {
            device: id.to_owned(),
            bytes: 100_000,
            filled: 2,
            units: 2,
            is_mounted: true,
            disk_error: Some("full".to_owned()),
            ..DeviceStatus::default()
        }
    }

    fn check(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.lines().any(|it| it == *line), "{line}\n{text}");
        }
    }

    #[test]
    fn each_device_has_metrics() {
        let mut device = device("ab");
        device.counts.failures_by_cause = LazyFailures { denied: 7, ..LazyFailures::default() };
        device.counts.waits = 3;
        device.counts.wait_micros = 1_500_000;
        device.counts.wait_histogram = vec![1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        let images = ["app:1".to_owned()];
        let text = device_metrics(true, &[device], |id| match id {
            "ab" => &images[..],
            _ => &[],
        });
        let lines = [
            "quire_lazy_up 1",
            "# TYPE quire_lazy_filled_bytes gauge",
            "quire_lazy_filled_bytes{device=\"ab\"} 100000",
            "quire_lazy_failures_total{device=\"ab\",cause=\"denied\"} 7",
            "quire_lazy_failures_total{device=\"ab\",cause=\"silent\"} 0",
            "quire_lazy_device_info{device=\"ab\",image=\"app:1\"} 1",
            "quire_lazy_disk_refuses{device=\"ab\"} 1",
            "quire_lazy_waiting_reads{device=\"ab\"} 0",
            "quire_lazy_wait_seconds_bucket{device=\"ab\",le=\"0.000100\"} 1",
            "quire_lazy_wait_seconds_bucket{device=\"ab\",le=\"0.001000\"} 2",
            "quire_lazy_wait_seconds_bucket{device=\"ab\",le=\"30.000000\"} 2",
            "quire_lazy_wait_seconds_bucket{device=\"ab\",le=\"+Inf\"} 3",
            "quire_lazy_wait_seconds_sum{device=\"ab\"} 1.500000",
        ];
        check(&text, &lines);
        let none = device_metrics(false, &[], |_| &[]);
        assert_eq!(none.lines().nth(2), Some("quire_lazy_up 0"));
    }

    /// Prometheus takes each decrease for a restart, and would count the remaining sum once more.
    #[test]
    fn sums_never_decrease_and_name_no_device() {
        let with = |id: &str, reads: u64, bytes: u64, waits: Vec<u64>| {
            let mut device = device(id);
            device.counts.reads = reads;
            device.counts.waiting = 1;
            device.counts.failures_by_cause.bytes = bytes;
            device.counts.wait_micros = 1_000_000 * waits.iter().sum::<u64>();
            device.counts.wait_histogram = waits;
            device
        };
        let mut totals = LazyTotals::default();
        totals.add(&[with("ab", 10, 0, vec![1, 2]), with("cd", 5, 1, vec![])]);
        totals.add(&[with("ab", 12, 0, vec![1, 3]), with("cd", 5, 1, vec![])]);
        // One device is released, and the other one belongs to a service that was restarted.
        let after = [with("ab", 3, 2, vec![0, 1])];
        totals.add(&after);
        let text = totals.text(Some(&after));
        let lines = [
            "quire_lazy_up 1",
            "quire_lazy_devices 1",
            "quire_lazy_disk_refuses 1",
            "quire_lazy_broken_devices 0",
            "quire_lazy_device_bytes 100000",
            "quire_lazy_waiting_reads 1",
            // 12 and 5, then 3 of the new service.
            "quire_lazy_reads_total 20",
            "quire_lazy_failures_total{cause=\"bytes\"} 3",
            "quire_lazy_failures_total{cause=\"denied\"} 0",
            "quire_lazy_wait_seconds_bucket{le=\"0.000100\"} 1",
            "quire_lazy_wait_seconds_bucket{le=\"0.000300\"} 5",
            "quire_lazy_wait_seconds_bucket{le=\"+Inf\"} 5",
            "quire_lazy_wait_seconds_count 5",
            "quire_lazy_wait_seconds_sum 5.000000",
        ];
        check(&text, &lines);
        assert!(!text.contains("ab\"") && !text.contains("sha256"), "{text}");
        let text = totals.text(None);
        check(&text, &["quire_lazy_up 0", "quire_lazy_devices 0", "quire_lazy_reads_total 20"]);
    }
}
