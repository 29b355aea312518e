//! Metrics of `serve --snapshotter`, as Prometheus's own program reads them, and the alerts on them.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use testing::documents::repository;

use super::*;

/// Requests a page of a service. Returns its head and its body.
pub(super) fn get(socket: &Path, page: &str) -> std::io::Result<(String, String)> {
    let mut stream = UnixStream::connect(socket)?;
    let request = format!("GET {page} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    Ok((head.to_owned(), body.to_owned()))
}

/// Runs promtool, which must succeed. Returns its output.
fn promtool(words: &[&str], input: &str) -> Option<String> {
    let mut command = testing::command("promtool")?;
    let folder = repository().join("dist/prometheus");
    command.args(words).current_dir(folder).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    let ran = Ran::from_output(&child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(0), "promtool {words:?}: {}{}\n{input}", ran.out, ran.err);
    Some(format!("{}{}", ran.out, ran.err))
}

/// Returns the names of metrics in a text.
fn names(text: &str) -> BTreeSet<&str> {
    let is_name = |it: char| it == '_' || it.is_ascii_lowercase();
    text.split(|it| !is_name(it)).filter(|it| it.starts_with("quire_")).collect()
}

#[test]
fn promtool_takes_the_alerts() {
    let Some(checked) = promtool(&["check", "rules", "quire.rules.yml"], "") else { return };
    assert!(checked.contains("14 rules found"), "{checked}");
    promtool(&["test", "rules", "quire.test.yml"], "");
}

/// An alert on a metric that does not exist never fires.
#[test]
fn promtool_takes_the_metrics_and_alerts_name_them() {
    if !is_root() {
        return;
    }
    let place = &EnginePlace(Place::new()).0;
    if !place.is_on_disk() {
        return;
    }
    let [socket, metrics] = ["snapshotter", "metrics"].map(|it| place.path(it));
    let mut service = snapshotter(place, &socket, &["--metrics", metrics.to_str().unwrap()]);
    let mut page = String::new();
    wait_for("the store is measured", || {
        let (head, body) = get(&metrics, "/metrics").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        page = body;
        page.contains("quire_store_images ")
    });
    let described: BTreeSet<_> =
        page.lines().filter_map(|it| it.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let rules = repository().join("dist/prometheus/quire.rules.yml");
    let rules = fs::read_to_string(rules).unwrap();
    let named = names(&rules);
    assert!(named.len() > 12, "{named:?}");
    for name in named {
        let name = name.strip_suffix("_bucket").unwrap_or(name);
        assert!(described.contains(name), "{name} is not in\n{page}");
    }
    assert_eq!(get(&metrics, "/healthz").unwrap().1, "ok\n");
    // The engine could not connect any more, so the pod must be restarted.
    fs::remove_file(&socket).unwrap();
    let (head, _) = get(&metrics, "/healthz").unwrap();
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    assert!(service.end().success());
    assert!(!metrics.exists());
    promtool(&["check", "metrics"], &page);
}

#[test]
fn addresses_of_metrics_are_checked() {
    let place = Place::new();
    let serve = |options: &str| {
        let ran = place.run(&format!("serve --snapshotter {options}"));
        assert_eq!(ran.code, Some(2), "{options}: {}", ran.err);
        ran.err
    };
    let refused = serve("--metrics 0.0.0.0:9110");
    assert!(refused.contains("--metrics: other hosts reach 0.0.0.0:9110"), "{refused}");
    let refused = serve("--metrics localhost:9110");
    assert!(refused.contains("neither an address with a port"), "{refused}");
    let refused = serve("--metrics-remote");
    assert!(refused.contains("--metrics <ADDRESS>"), "{refused}");
    fs::write(place.path("serve.toml"), "[snapshotter]\nmetrics = \"[::]:1\"\n").unwrap();
    let refused = serve("--config serve.toml");
    assert!(refused.contains("serve.toml: other hosts reach [::]:1"), "{refused}");
    if !is_root() {
        return;
    }
    let used = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = used.local_addr().unwrap();
    let refused = serve(&format!("--metrics {address}"));
    assert!(refused.contains(&format!("cannot listen for metrics on {address}")), "{refused}");
}
