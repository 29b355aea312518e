//! Pods, as kubelet runs them by containerd: from `PullImage` to a running container.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use rig::inputs::layout;
use rig::inputs::{self, layer};
use rig::process::quiet;
use rig::tools;
use serde_json::{Value, json};

use super::kind::Kind;
use super::node::{Node, quoted};
use super::{COLD, Entry, Here, MOST_ASIDE, Stage};
use crate::Context;
use crate::command::{cmd, more, run};
use crate::measure::{Contestant, Rules};
use crate::registry;
use crate::report::{Report, Table};
use crate::samples::{self, Sample};

const ABOUT: &str = "Pods by containerd 2.4.2 through Kubernetes' interface to engines (CRI), with the images, the \
registry and the snapshotters of the bench `engine`. The command is one `crictl`: `crictl run --with-pull` makes a \
pod, pulls the image and starts a container of it, `crictl pull` is only `PullImage`. `crictl version` is a separate \
row, because each other row includes such a start. The pod's own image is pulled before, and its network is the \
host's, so no plugin of the network takes time. The program is `sleep`: the time ends when it runs. Each run has a \
new folder for the engine, with nothing or with what a title says. Processor time is that of the commands, of \
containerd with all it starts, and of the services beside it.\n\n\
*by another name*, *layers in its store*, \
*layer_content_caches*: as there.";

/// Reference of the image whose container holds a pod's namespaces.
fn pause(stage: &Stage<'_>) -> String {
    format!("{}/pause:1", stage.registry.host)
}

/// A program that only waits, like Kubernetes' pause.
const PAUSE: &str = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n";

const HERE: [Entry; 6] = [
    Entry::new(Kind::QuireSkip, Here::InStore),
    Entry::new(Kind::ErofsCaches, Here::Nothing),
    Entry::named("Quire, by another name", Kind::Quire, Here::OtherName),
    Entry::named("overlayfs, by another name", Kind::Overlayfs, Here::OtherName),
    Entry::named("erofs, by another name", Kind::Erofs, Here::OtherName),
    Entry::named("soci-snapshotter, by another name", Kind::Soci, Here::OtherName),
];

/// Title of the run that measures the client's start, with a request that does almost nothing.
const CLIENT: &str = "crictl version, nothing else";

/// The timed part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Running,
    Pulled,
}

const CASES: [(&str, &[Entry], Part); 3] = [
    ("cold: a pod's container runs", &COLD, Part::Running),
    ("all layers here: a pod's container runs", &HERE, Part::Running),
    ("all layers here: PullImage", &HERE, Part::Pulled),
];

pub(crate) fn bench(context: &Context<'_>) -> Result<Report> {
    let mut findings = Vec::new();
    let stage = Stage::new(context, &mut findings)?;
    let crictl = tools::crictl(context.cache)?;
    publish_pause(&stage)?;
    registry::copy(&inputs::debian_base(context.cache)?, &stage.base())?;
    let mut tables = Vec::new();
    for sample in ["nginx", "postgres"].map(samples::find) {
        let name = sample.name;
        let titles: Vec<_> = CASES.iter().map(|(title, ..)| format!("{name}, {title}")).collect();
        if !titles.iter().any(|it| context.wants(it)) {
            continue;
        }
        stage.publish(sample)?;
        let program = &sample.programs[0];
        findings.extend(stage.try_all(sample, program)?);
        for ((_, entries, part), title) in CASES.iter().zip(titles) {
            if context.wants(&title) {
                tables.push(race(&stage, &crictl, sample, entries, *part, title)?);
            }
        }
    }
    findings.extend(tables.iter().flat_map(Table::shares).filter(|it| !it.contains(CLIENT)));
    findings.extend(tables.iter().filter_map(aim));
    Ok(Report { name: "pods", about: ABOUT.to_owned(), tables, findings, ..Report::default() })
}

/// Compares a table with its target in milliseconds, which includes the client's start, if all layers are in the
/// store.
fn aim(table: &Table) -> Option<String> {
    let most = match () {
        () if table.title.ends_with("here: PullImage") => 60.0,
        () if table.title.ends_with("here: a pod's container runs") => 250.0,
        () => return None,
    };
    let ours = table.outcomes.first()?;
    let took = ours.median.as_secs_f64() * 1e3;
    let met = if took <= most { "met" } else { "missed" };
    let (title, name) = (&table.title, &ours.name);
    Some(format!("{title}: {name}: {took:.0} ms; the aim, at most {most:.0} ms, is {met}"))
}

fn publish_pause(stage: &Stage<'_>) -> Result<()> {
    let work = stage.context.work.join("pause");
    let tree = work.join("tree");
    fs::create_dir_all(&tree)?;
    let source = work.join("pause.c");
    fs::write(&source, PAUSE)?;
    run!("cc -static -O2 -o {tree}/pause {source}")?;
    let layer = layer::write(&tree, &work, layer::Mtime::WholeSeconds)?;
    let mut config = layout::Config::default();
    config.entrypoint(&["/pause"]);
    let draft = work.join("layout");
    layout::write(&draft, &config, &[layer])?;
    registry::copy(&draft, &pause(stage))
}

/// The engine's configuration tables for pods on a host where root lacks some rights and has no network plugin.
fn tables(stage: &Stage<'_>) -> Result<String> {
    let work = stage.context.work;
    let (network, certs) = (work.join("net.d"), work.join("certs.d"));
    let host = &stage.registry.host;
    fs::create_dir_all(&network)?;
    fs::create_dir_all(certs.join(host))?;
    write(
        &network.join("1-lo.conflist"),
        &json!({"cniVersion": "1.0.0", "name": "lo", "plugins": [{"type": "loopback"}]}),
    )?;
    fs::write(certs.join(host).join("hosts.toml"), format!("[host.\"http://{host}\"]\n"))?;
    let (runtime, images) = ("io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images");
    Ok(format!(
        "[plugins.\"{runtime}\"]\nrestrict_oom_score_adj = true\n\
         [plugins.\"{runtime}\".cni]\nconf_dir = {}\n\
         [plugins.\"{images}\".pinned_images]\nsandbox = \"{}\"\n\
         [plugins.\"{images}\".registry]\nconfig_path = {}\n",
        quoted(&network),
        pause(stage),
        quoted(&certs)
    ))
}

fn write(path: &Path, value: &Value) -> Result<()> {
    fs::write(path, value.to_string()).with_context(|| format!("cannot write {}", path.display()))
}

/// Returns a command of Kubernetes' client for a node's engine.
fn client(node: &Node<'_>, crictl: &Path) -> Command {
    let place = node.place();
    cmd!(
        "{crictl} --runtime-endpoint unix://{place}/socket",
        "--image-endpoint unix://{place}/socket --timeout 120s"
    )
}

fn race(
    stage: &Stage<'_>,
    crictl: &Path,
    sample: &Sample,
    entries: &[Entry],
    part: Part,
    title: String,
) -> Result<Table> {
    stage.context.make_room(MOST_ASIDE)?;
    let tables = tables(stage)?;
    let (pod, container) =
        (stage.context.work.join("pod.json"), stage.context.work.join("container"));
    write(
        &pod,
        &json!({
            "metadata": {"name": "bench", "namespace": "default", "uid": "quire-bench"},
            // 2 is `NODE`. Source: Kubernetes' CRI, `api.proto`, `NamespaceMode`.
            "linux": {"security_context": {"namespace_options": {"network": 2}}}
        }),
    )?;
    let entries: Vec<_> = entries.iter().filter(|it| it.kind.is_here(stage)).collect();
    let nodes: Vec<_> =
        entries.iter().map(|it| Node::for_pods(stage, it.kind, tables.clone())).collect();
    let alone = Node::for_pods(stage, Kind::Overlayfs, tables);
    let mut contestants = Vec::new();
    for (entry, node) in entries.iter().zip(&nodes) {
        let image = stage.image(sample, entry.kind, "1");
        let other = stage.image(sample, entry.kind, "2");
        let file = container.with_extension(entry.kind.tag("json"));
        write(
            &file,
            &json!({
                "metadata": {"name": "bench"},
                "image": {"image": image},
                "command": ["/bin/sleep", "1000"],
                "linux": {}
            }),
        )?;
        let pod = &pod;
        let commands = move || match part {
            Part::Pulled => more!(client(node, crictl), "pull {image}"),
            Part::Running => more!(client(node, crictl), "run --with-pull {file} {pod}"),
        };
        let before = move || {
            node.start_anew()?;
            let pause = pause(stage);
            quiet(&mut more!(client(node, crictl), "pull {pause}"))?;
            match entry.here {
                Here::OtherName => {
                    quiet(&mut more!(client(node, crictl), "pull {other}")).map(drop)?;
                }
                here => here.prepare(stage, node, sample)?,
            }
            rustix::fs::sync();
            Ok(())
        };
        let after = move || {
            quiet(&mut more!(client(node, crictl), "rmp --all --force"))?;
            node.stop()
        };
        let contestant = Contestant::new(entry.name, commands).before(before).after(after);
        contestants.push(contestant.services(|| node.spent()));
    }
    let version = Contestant::new(CLIENT, || more!(client(&alone, crictl), "version"));
    contestants.push(version.before(|| alone.start_anew()).after(|| alone.stop()));
    Rules::new(stage.context.runs).race(title, contestants)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::measure::{Memory, Outcome};

    #[test]
    fn an_aim_is_of_the_first_row_of_its_table() {
        let table = |title: &str, took| Table {
            title: title.to_owned(),
            memory: Memory::LargestProcess,
            runs: 1,
            outcomes: vec![Outcome {
                name: String::from("ours"),
                median: Duration::from_millis(took),
                min: Duration::ZERO,
                quartiles: [Duration::ZERO; 2],
                max: Duration::ZERO,
                cpu: Duration::ZERO,
                memory: None,
            }],
        };
        for (title, took, expect) in [
            ("x, all layers here: PullImage", 60, Some("60 ms, is met")),
            ("x, all layers here: PullImage", 61, Some("60 ms, is missed")),
            ("x, all layers here: a pod's container runs", 250, Some("250 ms, is met")),
            ("x, cold: a pod's container runs", 1, None),
        ] {
            let said = aim(&table(title, took));
            assert_eq!(said.is_some(), expect.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().ends_with(expect.unwrap_or_default()));
        }
    }
}
