//! Import of an OCI layout into a store, ready to be mounted.

use anyhow::Result;

use super::command::{cmd, run};
use super::measure::{Contestant, Memory, Rules};
use super::podman;
use super::report::{Report, Table};
use crate::{Context, version};
use rig::process::find_program;
use rig::{inputs, tools};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    let layout = &inputs::debian_postgres(context.cache, false)?;
    let ours = || cmd!("{quire} --store {work}/store import oci:{layout}:latest postgres");
    let umoci = find_program("umoci").map(|umoci| {
        let unpack = move || cmd!("{umoci} unpack --image {layout}:latest {work}/umoci");
        Contestant::new(format!("umoci unpack ({})", version("umoci")), unpack)
            .before(|| context.set_aside("umoci"))
    });
    let podman = find_program("podman").map(|_| {
        let pull = || podman::pull(context, layout);
        Contestant::new(format!("podman pull ({})", version("podman")), pull)
            .before(|| podman::set_aside(context))
    });
    let cfsctl = tools::built_cfsctl(context.cache);
    let cfsctl = cfsctl.as_ref().map(|cfsctl| {
        let pull = move || {
            let repository = work.join("cfsctl");
            cmd!("{cfsctl} --insecure --repo {repository} oci pull oci:{layout}:latest postgres")
        };
        Contestant::new("cfsctl oci pull (composefs-rs 0.9.4)", pull).before(move || {
            context.set_aside("cfsctl")?;
            run!("{cfsctl} --repo {work}/cfsctl init --insecure")
        })
    });
    let rows = [
        ("", Some(Contestant::new("quire import", ours).before(|| context.set_aside("store")))),
        ("umoci", umoci),
        ("podman", podman),
        ("cfsctl (cargo xtask inputs cfsctl)", cfsctl),
    ];
    let (table, findings) = race(context, "debian-postgres", rows, &["umoci", "podman", "cfsctl"])?;
    Ok(Report {
        name: "import",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers, 22,500 entries, 700 MB unpacked, into an empty store. The layers are in \
             the page cache. A `syncfs` of the file system is on everybody's clock.",
        ),
        tables: vec![table],
        findings,
        ..Report::default()
    })
}

/// The rules for ways to bring an image onto this machine: a sync is on the clock.
pub(super) fn synced(context: &Context<'_>) -> Rules {
    let sync = Some(context.work.to_owned());
    Rules { sync, memory: Memory::AllProcesses, ..Rules::new(context.runs) }
}

/// Measures ways to bring an image onto this machine, each with a sync on the clock, and compares Quire, which comes
/// first, with each of `rivals`, which are prefixes of contestants' names. A row without a contestant has the name of
/// the program that is not installed. podman's storage is removed at the end.
pub(super) fn race<'a>(
    context: &Context<'_>,
    title: &str,
    rows: impl IntoIterator<Item = (&'static str, Option<Contestant<'a>>)>,
    rivals: &[&str],
) -> Result<(Table, Vec<String>)> {
    let (mut contestants, mut findings) = (Vec::new(), Vec::new());
    for (program, contestant) in rows {
        match contestant {
            Some(contestant) => contestants.push(contestant),
            None => findings.push(format!("{program} is not installed")),
        }
    }
    let table = synced(context).race(title, contestants)?;
    podman::remove_all(context)?;
    findings.extend(rivals.iter().filter_map(|it| table.ratio("quire", it)));
    Ok((table, findings))
}
