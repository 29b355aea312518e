//! Prometheus's text format 0.0.4. Source: Prometheus, "Exposition formats".

use std::fmt::{Display, Write as _};

/// Returns the lines above the values of a metric.
#[must_use]
pub fn head(name: &str, kind: &str, help: &str) -> String {
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")
}

/// Returns the line of a value. `labels` may be empty.
#[must_use]
pub fn sample(name: &str, labels: &str, value: impl Display) -> String {
    match labels {
        "" => format!("{name} {value}\n"),
        labels => format!("{name}{{{labels}}} {value}\n"),
    }
}

/// Returns a metric with one value and without labels.
#[must_use]
pub fn single(name: &str, kind: &str, help: &str, value: impl Display) -> String {
    head(name, kind, help) + &sample(name, "", value)
}

/// Formats microseconds as seconds.
#[must_use]
pub fn seconds(micros: u64) -> String {
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}

/// Returns the value of a label, escaped and in quotes.
#[must_use]
pub fn quoted(text: &str) -> String {
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
/// than all ends. `labels` may be empty.
#[must_use]
pub fn histogram(name: &str, labels: &str, ends: &[u64], counts: &[u64], micros: u64) -> String {
    let mut text = String::new();
    let before = if labels.is_empty() { String::new() } else { format!("{labels},") };
    let mut sum = 0;
    for (end, count) in ends.iter().zip(counts) {
        sum += count;
        let end = seconds(*end);
        let _in_memory = writeln!(text, "{name}_bucket{{{before}le=\"{end}\"}} {sum}");
    }
    let all: u64 = counts.iter().sum();
    let _in_memory = writeln!(text, "{name}_bucket{{{before}le=\"+Inf\"}} {all}");
    text += &sample(&format!("{name}_sum"), labels, seconds(micros));
    text += &sample(&format!("{name}_count"), labels, all);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_may_have_no_labels() {
        let expect =
            "w_bucket{le=\"0.000100\"} 2\nw_bucket{le=\"+Inf\"} 5\nw_sum 1.500000\nw_count 5\n";
        assert_eq!(histogram("w", "", &[100], &[2, 3], 1_500_000), expect);
        let expect = "w_bucket{a=\"b\",le=\"0.000100\"} 2\nw_bucket{a=\"b\",le=\"+Inf\"} 5\n\
                      w_sum{a=\"b\"} 1.500000\nw_count{a=\"b\"} 5\n";
        assert_eq!(histogram("w", "a=\"b\"", &[100], &[2, 3], 1_500_000), expect);
    }
}
