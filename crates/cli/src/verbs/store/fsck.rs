//! `fsck`: checks the whole store for damage, and repairs it.

use clap::Args;
use store::{Damage, OpenOptions, StoreItem};

use crate::Answer;
#[cfg(feature = "registry")]
use crate::args::RegistryOptions;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::store::damage::{WAY_OUT, options, tell};
use crate::verbs::store::heal::{self, EngineUses};

#[derive(Debug, Args)]
pub(crate) struct Fsck {
    /// Remove damaged files, and fetch them again from the registries that their images came from; policies and
    /// credentials are those of `pull`. Images that came from elsewhere have to be imported again: until then, none
    /// of their containers starts. The exit code stays 1, because damage was found. Containers are never removed, nor
    /// container snapshots that something needs. A snapshot of an engine whose record is damaged is removed, with all that was written in it; end its service
    /// first. If a file cannot be read for another reason than damage (no memory, no descriptors, no permission), the
    /// check ends with 2 and the file stays
    #[arg(long)]
    pub(crate) repair: bool,
    /// Also rebuild the tar of every layer and check its digest; this takes about as long as an import
    #[arg(long)]
    pub(crate) deep: bool,
    /// With --repair, fetch nothing
    #[cfg(feature = "registry")]
    #[arg(long, requires = "repair")]
    pub(crate) no_fetch: bool,
    #[cfg(feature = "registry")]
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

impl VerbArgs for Fsck {
    const NAME: &'static str = "fsck";
    const ABOUT: &'static str = "Check the whole store for damage";
    const EXAMPLES: &'static str = "quire fsck\n  quire fsck --repair";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        fsck(context, self)
    }
}

pub(crate) fn fsck(context: &Context, args: &Fsck) -> anyhow::Result<Answer> {
    #[cfg(feature = "registry")]
    args.registry.check_several()?;
    let open = if args.repair { OpenOptions::write() } else { OpenOptions::read() };
    let store = context.open(open)?;
    let report = if args.deep { store.fsck_deep(options())? } else { store.fsck(options())? };
    // With `--repair`, the results of the repair are printed later, so no advice is printed now.
    let is_snapshot = |it: &Damage| matches!(it, Damage::Bad(StoreItem::Snapshot(..), _));
    let has_snapshots = report.damage.iter().any(|it| is_snapshot(&it.0));
    let way_out = match (args.repair, has_snapshots) {
        (true, _) => "",
        (false, true) => WAY_OUT_OF_SNAPSHOTS,
        (false, false) => WAY_OUT,
    };
    let answer = tell(context, &report, &EngineUses::from_store(&store)?, way_out)?;
    if args.repair && !report.is_sound() {
        let removed = store.remove_damaged(&report)?;
        let files = if removed == 1 { "file" } else { "files" };
        context.remark(&format!("{removed} damaged {files} removed"));
        if has_snapshots {
            context.remark(
                "a snapshot with a damaged record was removed, with all data that its container \
                wrote: let the engine remove the container, or pull the image again",
            );
        }
        for (damage, _) in &report.damage {
            if let Damage::Bad(StoreItem::Container(id), _) = damage {
                // An import would not restore the data that the container has written, and the container may be
                // running.
                context.remark(&format!(
                    "container {id} stays, with its writable layer: `quire rm --force {id}` removes it"
                ));
            }
        }
        #[cfg(feature = "registry")]
        let registry = (!args.no_fetch).then_some(&args.registry);
        #[cfg(not(feature = "registry"))]
        let registry = None;
        heal::bring_back(context, &store, registry)?;
    }
    Ok(answer)
}

const WAY_OUT_OF_SNAPSHOTS: &str = "`quire fsck --repair` removes the damage, and with a snapshot \
    whose record is damaged all data that its container wrote. Stop the service of its engine first";
