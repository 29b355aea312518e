//! `doctor`: what this host can do, and what Quire would choose.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use container::runtime::Runtime;
use kernel::features::{Can, Cgroups, probe};
use kernel::mount::OVERLAY_VERITY;
use kernel::version::KernelVersion;
use serde_json::{Value, json};
use store::{OpenOptions, Store};

use crate::Answer;
use crate::context::Context;
use crate::report;

pub(crate) fn doctor(context: &Context) -> anyhow::Result<Answer> {
    let store = context.store_directory()?;
    let directory = existing(&store);
    let opened = std::fs::File::open(&directory)
        .with_context(|| format!("cannot open {}", directory.display()))?;
    let features = probe(opened.as_fd(), context.who());
    let search = std::env::var_os("PATH").unwrap_or_default();
    let runtime = Runtime::find(&search, None, None);
    let runtime = match &runtime {
        Ok(runtime) if !runtime.works() => {
            format!("{}, which does not work: its `--version` fails", runtime.path.display())
        }
        Ok(runtime) => match runtime.obstacle() {
            Some(path) => format!(
                "{} (with {} covered in the container's own namespace)",
                runtime.path.display(),
                path.display()
            ),
            None => runtime.path.display().to_string(),
        },
        Err(error) => error.to_string(),
    };
    let chosen = [
        (
            "verification",
            match features.fs_verity.can {
                Can::Yes if KernelVersion::running() >= Some(OVERLAY_VERITY) => {
                    "by the kernel at every read (fs-verity)"
                }
                _ => "at import, and by `quire verify`: reads are not checked",
            },
        ),
        (
            "images",
            match (features.erofs_from_file.can, features.loop_devices.can) {
                (Can::Yes, _) => "mounted straight from their files",
                (_, Can::Yes) => "mounted through loop devices",
                _ => "cannot be mounted",
            },
        ),
    ];
    let writable = match container::root::filestore::program(&search) {
        _ if !context.who().is_host_root() => "memory",
        Some(_) => "self: one file with an ext4 inside",
        None => "memory, for want of mkfs.ext4 (package e2fsprogs)",
    };
    let (form, why) = crate::forms::auto(opened.as_fd());
    let form = format!("{form}: {why}");
    let chosen =
        [&chosen[..], &[("form", &form), ("writable", writable), ("O_DIRECT", DIRECT)]].concat();
    let policy = crate::policy::describe(context);
    let root = context.who().is_host_root();
    let opened = Store::open(&store, context.who(), OpenOptions::read()).ok();
    let exposed = opened.and_then(|it| it.exposure().ok()).unwrap_or_default();
    let exposed: Vec<_> = exposed.iter().map(ToString::to_string).collect();
    if context.json {
        let rows = features.rows().map(|(name, feature)| {
            json!({"feature": name, "can": word(feature.can), "reason": feature.reason})
        });
        report::json(&json!({
            "kernel": features.release,
            "store": store.display().to_string(),
            "exposed": exposed,
            "root": root,
            "cgroups": features.cgroups.to_string(),
            "features": rows.into_iter().collect::<Vec<Value>>(),
            "runtime": runtime,
            "policy": policy,
            "choices": chosen.iter().map(|(name, it)| ((*name).to_owned(), Value::from(*it)))
                .collect::<serde_json::Map<_, _>>(),
        }))?;
        return Ok(Answer::Yes);
    }
    let mut out = report::standard_output();
    writeln!(out, "kernel         {}", features.release)?;
    writeln!(out, "cgroups        {}", cgroups(features.cgroups))?;
    writeln!(out, "store          {}", store.display())?;
    for exposure in &exposed {
        writeln!(out, "exposed        {exposure}")?;
    }
    writeln!(
        out,
        "user           {}",
        if root { "root" } else { "not root: mount and run need root" }
    )?;
    writeln!(out, "runtime        {runtime}")?;
    writeln!(out, "policy         {policy}")?;
    for (name, choice) in &chosen {
        writeln!(out, "{name:<14} {choice}")?;
    }
    writeln!(out)?;
    for (name, feature) in features.rows() {
        writeln!(out, "{:<8} {name}: {}", word(feature.can), feature.reason)?;
    }
    out.flush()?;
    Ok(Answer::Yes)
}

/// EROFS that reads from files has no direct I/O.
const DIRECT: &str = "fails (EINVAL) on files of the forms packed and tar unless `--io loop` is given; works on those of the form \
                      objects";

const fn word(can: Can) -> &'static str {
    match can {
        Can::Yes => "yes",
        Can::No => "no",
        Can::Unknown => "unknown",
    }
}

const fn cgroups(found: Cgroups) -> &'static str {
    match found {
        Cgroups::V1 => "version 1",
        Cgroups::Hybrid => "version 1, with version 2 beside it",
        Cgroups::V2 => "version 2",
        Cgroups::Absent => "not mounted on /sys/fs/cgroup",
    }
}

/// The path, or the nearest directory above it that is there: where the store would be.
fn existing(path: &Path) -> PathBuf {
    let found = path.ancestors().find(|it| it.is_dir());
    found.map_or_else(|| PathBuf::from("/"), Path::to_path_buf)
}
