//! `gc`: frees data that nothing uses.

use std::io::{self, Write};

use clap::Args;
use container::life::end::reap::{Sweep, clear_dead};
use serde::Serialize;
use store::{Dead, Freeing, GcLimits, GcPlan, Kept, OpenOptions, PIN_SECONDS, Seconds, Swept};

use crate::Answer;
use crate::args::limits::{seconds, size};
use crate::output::report::{self, Bytes};
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;
use crate::verbs::containers::networks::join::sweep;

#[derive(Debug, Args)]
pub(crate) struct Gc {
    /// Print what would be freed, and free nothing
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
    /// Also free the downloads of interrupted pulls, which are otherwise kept for a week
    #[arg(long)]
    pub(crate) unfinished: bool,
    /// Keep unused data that was added to the store within this time, for example 24h or 7d
    #[arg(long, value_name = "DURATION", value_parser = seconds)]
    pub(crate) older_than: Option<i64>,
    /// Free unused data only until the store takes no more disk space than this, the oldest first, for example 20g
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) keep_storage: Option<u64>,
    /// Wait until the leftovers of ended containers are removed. Their removal continues after `run`, `stop` and `rm`
    /// return, and the store's disk cannot be unmounted before it ends
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) wait: bool,
}

impl VerbArgs for Gc {
    const NAME: &'static str = "gc";
    const ABOUT: &'static str = "Free unused data";
    const DETAILS: &'static str = "\
        Quire keeps data that a name, a container, a mount or a running import uses. It never removes a name: \
        `rmi` does.\n\n\
        Unused data is a cache for later imports and pulls. `--older-than` and `--keep-storage` keep some of it.";
    const EXAMPLES: &'static str =
        "quire gc --dry-run\n  quire gc\n  quire gc --older-than 7d --keep-storage 20g";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        gc(context, self)
    }
}

pub(crate) fn gc(context: &Context, args: &Gc) -> anyhow::Result<Answer> {
    // With `--unfinished`, plan for a time when the pins of downloads have expired. A running pull is protected
    // like any import: `gc` keeps the data that it relies on.
    let later = if args.unfinished { PIN_SECONDS + 1 } else { 0 };
    let when = Seconds(now().0.saturating_add(later));
    let limits = GcLimits {
        added_before: args.older_than.map(|it| Seconds(now().0.saturating_sub(it))),
        keep_bytes: args.keep_storage,
    };
    let options = if args.dry_run { OpenOptions::read() } else { OpenOptions::write() };
    let Some(store) = context.open_for(options, true)? else {
        let swept = (!args.dry_run).then(Swept::default);
        let report = GcReport::new(&GcPlan::default(), swept, 0);
        report::print(context.json, &report, |it, out| it.write(args, out))?;
        return Ok(Answer::Yes);
    };
    let (plan, swept) = if args.dry_run {
        (store.plan_gc_within(when, &limits)?, None)
    } else {
        let (cleared, _) = clear_dead(&store, Sweep::Thorough, &|| now().0);
        sweep(context);
        // The process that waits for the disk may have been killed.
        if let Err(error) = store.settle_container_snapshots() {
            context.remark(&format!(
                "some snapshots are lost if the machine restarts: {:#}",
                anyhow::Error::from(error)
            ));
        }
        // The service keeps lazy devices open even if they are not in use.
        #[cfg(feature = "serve")]
        serve::lazy::release(&store);
        let (plan, mut swept) = store.gc_within(when, &limits)?;
        swept.removed += cleared;
        (plan, Some(swept))
    };
    if args.wait {
        container::life::lookup::settle(&store)?;
    }
    let unfinished = store.downloads.unfinished()?;
    let report = GcReport::new(&plan, swept, unfinished);
    report::print(context.json, &report, |it, out| it.write(args, out))?;
    Ok(Answer::Yes)
}

/// Describes the unused part of a device that is kept.
fn unneeded(dead: &Dead) -> String {
    let when = match dead.freeing {
        Freeing::Now => "can be freed",
        Freeing::InUse => "can be freed when no process has it mounted or open",
        Freeing::Linked => {
            "can be freed when the other hard links of the device, such as those of `quire bundle --vm`, are removed"
        }
        Freeing::Imports => "can be freed when the running imports end",
        Freeing::NoSpace => {
            "can be freed when the disk has space for a new index of the device: free some, and \
            run `quire gc` again"
        }
        Freeing::Sealed => {
            "cannot be freed, because the device is sealed: it is freed with the last image that \
            needs the device"
        }
        Freeing::Unsupported => {
            "cannot be freed, because the file system cannot free parts of files: it is freed \
            with the last image that needs the device"
        }
        _ => "cannot be freed now",
    };
    format!("{} of device {} {when}", report::size(dead.bytes), dead.device)
}

/// Report of `gc --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct GcReport {
    /// Things that are not in use.
    garbage: Vec<GarbageReport>,
    /// Unused parts of devices that are kept.
    unneeded: Vec<UnneededReport>,
    /// Part of `freed` that comes from devices that are kept. Null with `--dry-run`.
    trimmed: Option<Bytes>,
    /// Garbage that is still in use.
    kept: Vec<KeptReport>,
    /// Number of things that were removed. Null with `--dry-run`.
    removed: Option<u64>,
    /// Disk space that was freed. Null with `--dry-run`.
    freed: Option<Bytes>,
    /// Disk space that will be freed when the running imports have ended. Null with `--dry-run`.
    set_aside: Option<Bytes>,
    /// Size of the data from interrupted or running pulls.
    unfinished: Bytes,
    /// Size of the unused data that is kept because of `--older-than` or `--keep-storage`.
    spared: Bytes,
}

impl GcReport {
    fn new(plan: &GcPlan, swept: Option<Swept>, unfinished: u64) -> Self {
        let garbage = plan.garbage.iter().map(|(it, bytes)| GarbageReport {
            kind: it.kind(),
            name: it.name(),
            bytes: Bytes(*bytes),
        });
        let unneeded = plan.dead.iter().map(|it| UnneededReport {
            device: it.device.to_string(),
            bytes: Bytes(it.bytes),
            now: it.freeing == Freeing::Now,
            text: unneeded(it),
        });
        Self {
            garbage: garbage.collect(),
            unneeded: unneeded.collect(),
            trimmed: swept.map(|it| Bytes(it.trimmed)),
            kept: plan.kept.iter().map(KeptReport::from_kept).collect(),
            removed: swept.map(|it| it.removed),
            freed: swept.map(|it| Bytes(it.freed)),
            set_aside: swept.map(|it| Bytes(it.set_aside)),
            unfinished: Bytes(unfinished),
            spared: Bytes(plan.spared),
        }
    }

    /// Prints the report for people.
    fn write(&self, args: &Gc, out: &mut dyn Write) -> io::Result<()> {
        for it in &self.kept {
            writeln!(out, "kept: {}", it.text)?;
        }
        match (self.removed, self.freed) {
            (Some(removed), Some(Bytes(freed))) => {
                for it in self.unneeded.iter().filter(|it| !it.now) {
                    writeln!(out, "{}", it.text)?;
                }
                writeln!(out, "{removed} removed, {} freed", report::size(freed))?;
            }
            _ => self.write_dry(out)?,
        }
        if let Some(Bytes(set_aside @ 1..)) = self.set_aside {
            let bytes = report::size(set_aside);
            writeln!(
                out,
                "{bytes} more can be freed when the running imports end: run gc again then"
            )?;
        }
        if self.spared.0 > 0 {
            let options = match (args.older_than, args.keep_storage) {
                (Some(_), Some(_)) => "--older-than and --keep-storage",
                (Some(_), None) => "--older-than",
                _ => "--keep-storage",
            };
            let bytes = report::size(self.spared.0);
            writeln!(out, "{bytes} of unused data are kept because of {options}")?;
        }
        if self.unfinished.0 > 0 && !args.unfinished {
            let bytes = report::size(self.unfinished.0);
            writeln!(
                out,
                "{bytes} of interrupted or running pulls are kept, so that the next pull \
                continues them: `quire gc --unfinished` frees them"
            )?;
        }
        Ok(())
    }

    /// Prints the plan of `--dry-run`.
    fn write_dry(&self, out: &mut dyn Write) -> io::Result<()> {
        for it in &self.garbage {
            writeln!(out, "{} {} ({})", it.kind, it.name, report::size(it.bytes.0))?;
        }
        for it in &self.unneeded {
            writeln!(out, "{}", it.text)?;
        }
        let garbage = self.garbage.iter().map(|it| it.bytes.0);
        let total = garbage.chain(self.unneeded.iter().filter(|it| it.now).map(|it| it.bytes.0));
        let total: u64 = total.sum();
        writeln!(out, "{} would be removed, {} freed", self.garbage.len(), report::size(total))
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct GarbageReport {
    /// `object`, `image`, `layer`, `manifest`, `blob`, `device`, `container`, `leftover` and so on.
    kind: &'static str,
    /// Id, digest or name of the thing.
    name: String,
    /// Disk space that its removal frees; 0 for a file with another hard link.
    bytes: Bytes,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct UnneededReport {
    /// Id of the device.
    device: String,
    /// Size of the unused part of the device.
    bytes: Bytes,
    /// Whether it can be freed now.
    now: bool,
    /// The finding as text.
    text: String,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeptReport {
    /// Image id. Null if it is a device.
    image: Option<String>,
    /// Container that uses the image. Null if it is mounted or open otherwise.
    container: Option<String>,
    /// Id of the device. Null if it is an image.
    device: Option<String>,
    /// The finding as text.
    text: String,
}

impl KeptReport {
    fn from_kept(it: &Kept) -> Self {
        let (image, container, device) = match it {
            Kept::InUse(image) => (Some(image), None, None),
            Kept::Container(image, id) => (Some(image), Some(id), None),
            Kept::ContainerSnapshot(image, _) | Kept::Snapshot(image, _) => {
                (Some(image), None, None)
            }
            Kept::Device(device) => (None, None, Some(device)),
            _ => (None, None, None),
        };
        Self {
            image: image.map(ToString::to_string),
            container: container.cloned(),
            device: device.map(ToString::to_string),
            text: kept(it),
        }
    }
}

fn kept(kept: &Kept) -> String {
    match kept {
        Kept::InUse(image) => format!("image {image} is mounted or open"),
        Kept::Device(device) => format!("device {device} is mounted or open"),
        Kept::Container(image, id) => format!("container {id} uses image {image}"),
        Kept::ContainerSnapshot(image, id) => format!("snapshot {id} uses image {image}"),
        Kept::Snapshot(image, instance) => {
            format!("a snapshot of instance {instance} uses image {image}")
        }
        _ => "an image in use".to_owned(),
    }
}
