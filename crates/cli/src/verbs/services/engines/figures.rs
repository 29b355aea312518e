//! `ps --engine --metrics`: prints the counters of the snapshotter for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serve::snapshots::CALL_TIMES;
use serve::snapshots::{CallCounts, GetCountsResponse, OutcomeCount};

use crate::output::metrics::{head, histogram, quoted};

/// Returns all metrics: the counters of the service, if one is running, and the mounted roots of all services.
pub(super) fn metrics<'a>(
    counts: Option<&GetCountsResponse>,
    mounted_roots: impl Iterator<Item = (&'a str, &'static str)>,
) -> String {
    let mut text = String::new();
    let head =
        |name: &str, kind: &str, help: &str| head(&format!("quire_snapshotter_{name}"), kind, help);
    text += &head("up", "gauge", "Whether a service answers at its socket.");
    let _in_memory = writeln!(text, "quire_snapshotter_up {}", u8::from(counts.is_some()));
    text += &head("mounted_roots", "gauge", "Roots of snapshots that are mounted.");
    let mut mounted = BTreeMap::<_, u64>::new();
    for root in mounted_roots {
        *mounted.entry(root).or_default() += 1;
    }
    for ((instance, kind), count) in mounted {
        let instance = quoted(instance);
        let _in_memory = writeln!(
            text,
            "quire_snapshotter_mounted_roots{{instance={instance},kind=\"{kind}\"}} {count}"
        );
    }
    let Some(counts) = counts else { return text };
    let instance = format!("instance={}", quoted(&counts.instance));
    type Value = fn(&GetCountsResponse) -> u64;
    let values: [(&str, &str, Value); 10] = [
        ("read_layers_total", "Layers that were read from blobs.", |it| it.read_layers),
        ("read_bytes_total", "Bytes of the tars of these layers.", |it| it.read_bytes),
        ("known_layers_total", "Layers that were not unpacked: the store had them.", |it| {
            it.known_layers
        }),
        ("skipped_layers_total", "Layers that were not downloaded: the store had them.", |it| {
            it.skipped_layers
        }),
        ("committed_layers_total", "Layers that were made of the changes to roots.", |it| {
            it.committed_layers
        }),
        ("committed_bytes_total", "Bytes on disk that these layers added.", |it| {
            it.committed_bytes
        }),
        ("collections_total", "Garbage collections that ended well.", |it| it.collections),
        ("failed_collections_total", "Garbage collections that failed.", |it| {
            it.failed_collections
        }),
        ("collected_items_total", "Files that garbage collections removed.", |it| {
            it.collected_items
        }),
        ("collected_bytes_total", "Bytes on disk that garbage collections freed.", |it| {
            it.collected_bytes
        }),
    ];
    for (name, help, value) in values {
        text += &head(name, "counter", help);
        let _in_memory = writeln!(text, "quire_snapshotter_{name}{{{instance}}} {}", value(counts));
    }
    text += &head("calls_total", "counter", "Calls of the engine, by their outcome.");
    for CallCounts { name, outcomes, .. } in &counts.calls {
        let name = quoted(name);
        for OutcomeCount { code, calls } in outcomes {
            let code = quoted(code);
            let _in_memory = writeln!(
                text,
                "quire_snapshotter_calls_total{{{instance},call={name},code={code}}} {calls}"
            );
        }
    }
    text += &head("call_seconds", "histogram", "How long calls of the engine took.");
    for CallCounts { name, histogram: counted, micros, .. } in &counts.calls {
        let labels = format!("{instance},call={}", quoted(name));
        let name = "quire_snapshotter_call_seconds";
        text += &histogram(name, &labels, &CALL_TIMES, counted, *micros);
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
            ..GetCountsResponse::default()
        };
        let text = metrics(Some(&counts), std::iter::empty());
        for line in [
            "quire_snapshotter_up 1",
            "# TYPE quire_snapshotter_calls_total counter",
            r#"quire_snapshotter_calls_total{instance="a\"b\n",call="Prepare",code="OK"} 3"#,
            r#"quire_snapshotter_skipped_layers_total{instance="a\"b\n"} 4"#,
            r#"quire_snapshotter_call_seconds_bucket{instance="a\"b\n",call="Prepare",le="0.000300"} 0"#,
            r#"quire_snapshotter_call_seconds_bucket{instance="a\"b\n",call="Prepare",le="0.001000"} 2"#,
            r#"quire_snapshotter_call_seconds_bucket{instance="a\"b\n",call="Prepare",le="+Inf"} 3"#,
            r#"quire_snapshotter_call_seconds_sum{instance="a\"b\n",call="Prepare"} 1.500000"#,
            r#"quire_snapshotter_call_seconds_count{instance="a\"b\n",call="Prepare"} 3"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        let text = metrics(None, std::iter::empty());
        assert!(text.contains("quire_snapshotter_up 0\n") && !text.contains("calls_total"));
    }
}
