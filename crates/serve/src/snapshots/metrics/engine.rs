//! Metrics of the calls of an engine, from the counters of a service.

use std::collections::BTreeMap;

use containerd_api::counts::{CallCounts, GetCountsResponse, OutcomeCount};

use crate::metrics::text::{head, histogram, quoted, sample, single};
use crate::snapshots::counts::CALL_TIMES;

/// Returns a value of the counters.
type Value = fn(&GetCountsResponse) -> u64;

/// Name, kind, help and value of each metric with one value.
const VALUES: [(&str, &str, &str, Value); 14] = [
    ("read_layers_total", "counter", "Layers that were read from blobs.", |it| it.read_layers),
    ("read_bytes_total", "counter", "Bytes of the tars of these layers.", |it| it.read_bytes),
    ("known_layers_total", "counter", "Layers that were not unpacked: the store had them.", |it| {
        it.known_layers
    }),
    (
        "skipped_layers_total",
        "counter",
        "Layers that were not downloaded: the store had them.",
        |it| it.skipped_layers,
    ),
    ("committed_layers_total", "counter", "Layers that were made of the changes to roots.", |it| {
        it.committed_layers
    }),
    ("committed_bytes_total", "counter", "Bytes on disk that these layers added.", |it| {
        it.committed_bytes
    }),
    ("repaired_layers_total", "counter", "Layers with lost data that were read again.", |it| {
        it.repaired_layers
    }),
    (
        "failed_repairs_total",
        "counter",
        "Attempts to read a layer with lost data again that failed.",
        |it| it.failed_repairs,
    ),
    (
        "damaged_snapshots",
        "gauge",
        "Snapshots whose records were damaged when the service began.",
        |it| it.damaged_snapshots,
    ),
    ("collections_total", "counter", "Garbage collections that ended well.", |it| it.collections),
    ("failed_collections_total", "counter", "Garbage collections that failed.", |it| {
        it.failed_collections
    }),
    (
        "last_collection_timestamp_seconds",
        "gauge",
        "End of the last garbage collection that ended well, in seconds since 1970; 0 for none.",
        |it| it.last_collection,
    ),
    ("collected_items_total", "counter", "Files that garbage collections removed.", |it| {
        it.collected_items
    }),
    ("collected_bytes_total", "counter", "Bytes on disk that garbage collections freed.", |it| {
        it.collected_bytes
    }),
];

fn name(metric: &str) -> String {
    format!("quire_snapshotter_{metric}")
}

/// Returns the counters of a service, if one is running, and the number of mounted roots, each given by the instance
/// and kind of its snapshot.
#[must_use]
pub fn snapshotter_metrics<'a>(
    counts: Option<&GetCountsResponse>,
    mounted_roots: impl Iterator<Item = (&'a str, &'static str)>,
) -> String {
    let help = "Whether a service answers at its socket.";
    let mut text = single(&name("up"), "gauge", help, u8::from(counts.is_some()));
    text += &head(&name("mounted_roots"), "gauge", "Roots of snapshots that are mounted.");
    let mut mounted = BTreeMap::<_, u64>::new();
    for root in mounted_roots {
        *mounted.entry(root).or_default() += 1;
    }
    for ((instance, kind), count) in mounted {
        let labels = format!("instance={},kind=\"{kind}\"", quoted(instance));
        text += &sample(&name("mounted_roots"), &labels, count);
    }
    let Some(counts) = counts else { return text };
    let instance = format!("instance={}", quoted(&counts.instance));
    for (metric, kind, help, value) in VALUES {
        text += &head(&name(metric), kind, help);
        text += &sample(&name(metric), &instance, value(counts));
    }
    text += &head(&name("calls_total"), "counter", "Calls of the engine, by their outcome.");
    for CallCounts { name: call, outcomes, .. } in &counts.calls {
        for OutcomeCount { code, calls } in outcomes {
            let labels = format!("{instance},call={},code={}", quoted(call), quoted(code));
            text += &sample(&name("calls_total"), &labels, calls);
        }
    }
    text += &head(&name("call_seconds"), "histogram", "How long calls of the engine took.");
    for CallCounts { name: call, histogram: counted, micros, .. } in &counts.calls {
        let labels = format!("{instance},call={}", quoted(call));
        text += &histogram(&name("call_seconds"), &labels, &CALL_TIMES, counted, *micros);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_lines_of_prometheus() {
        let mut histogram = vec![0; CALL_TIMES.len() + 1];
        histogram[1] = 2;
        histogram[CALL_TIMES.len()] = 1;
        let outcomes = vec![OutcomeCount { code: "OK".to_owned(), calls: 3 }];
        let calls =
            vec![CallCounts { name: "Prepare".to_owned(), outcomes, histogram, micros: 1_500_000 }];
        let counts = GetCountsResponse {
            instance: "a\"b\n".to_owned(),
            calls,
            skipped_layers: 4,
            last_collection: 1_700_000_000,
            damaged_snapshots: 2,
            ..GetCountsResponse::default()
        };
        let roots = [("e", "view"), ("e", "active"), ("e", "view")];
        let text = snapshotter_metrics(Some(&counts), roots.into_iter());
        for line in [
            "quire_snapshotter_up 1",
            r#"quire_snapshotter_mounted_roots{instance="e",kind="view"} 2"#,
            "# TYPE quire_snapshotter_calls_total counter",
            r#"quire_snapshotter_calls_total{instance="a\"b\n",call="Prepare",code="OK"} 3"#,
            r#"quire_snapshotter_skipped_layers_total{instance="a\"b\n"} 4"#,
            "# TYPE quire_snapshotter_damaged_snapshots gauge",
            r#"quire_snapshotter_damaged_snapshots{instance="a\"b\n"} 2"#,
            r#"quire_snapshotter_last_collection_timestamp_seconds{instance="a\"b\n"} 1700000000"#,
            r#"quire_snapshotter_call_seconds_bucket{instance="a\"b\n",call="Prepare",le="0.000300"} 0"#,
            r#"quire_snapshotter_call_seconds_bucket{instance="a\"b\n",call="Prepare",le="0.001000"} 2"#,
            r#"quire_snapshotter_call_seconds_bucket{instance="a\"b\n",call="Prepare",le="+Inf"} 3"#,
            r#"quire_snapshotter_call_seconds_sum{instance="a\"b\n",call="Prepare"} 1.500000"#,
            r#"quire_snapshotter_call_seconds_count{instance="a\"b\n",call="Prepare"} 3"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        let text = snapshotter_metrics(None, std::iter::empty());
        assert!(text.contains("quire_snapshotter_up 0\n") && !text.contains("calls_total"));
    }
}
