//! Prints metrics in Prometheus's text format 0.0.4. Source: Prometheus, "Exposition formats".

use std::fmt::Write as _;

/// Returns the lines above the values of a metric.
pub(crate) fn head(name: &str, kind: &str, help: &str) -> String {
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")
}

/// Formats microseconds as seconds.
pub(crate) fn seconds(micros: u64) -> String {
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}

/// Returns the value of a label, escaped and in quotes.
pub(crate) fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for it in text.chars() {
        match it {
            '"' | '\\' => quoted.extend(['\\', it]),
            '\n' => quoted.push_str("\\n"),
            it => quoted.push(it),
        }
    }
    quoted.push('"');
    quoted
}

/// Returns a histogram. Each element of `counts` is the number of events whose duration is at most the element of
/// `ends`, in microseconds, but more than the previous one. The last count is the number of events that took longer
/// than all ends.
pub(crate) fn histogram(
    name: &str,
    labels: &str,
    ends: &[u64],
    counts: &[u64],
    micros: u64,
) -> String {
    let mut text = String::new();
    let mut sum = 0;
    for (end, count) in ends.iter().zip(counts) {
        sum += count;
        let end = seconds(*end);
        let _in_memory = writeln!(text, "{name}_bucket{{{labels},le=\"{end}\"}} {sum}");
    }
    let all: u64 = counts.iter().sum();
    let time = seconds(micros);
    let _in_memory = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {all}");
    let _in_memory = writeln!(text, "{name}_sum{{{labels}}} {time}");
    let _in_memory = writeln!(text, "{name}_count{{{labels}}} {all}");
    text
}
