//! `umount`: unmounts images.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use kernel::mount::Unmount;

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::mounts::own_mounts::OwnMounts;

#[derive(Debug, Args)]
pub(crate) struct Umount {
    /// Directories where images are mounted
    #[arg(required = true, value_hint = ValueHint::DirPath)]
    pub(crate) directories: Vec<PathBuf>,
    /// Detach even a busy mount; the kernel frees it when its last user is gone
    #[arg(short, long)]
    pub(crate) lazy: bool,
}

impl VerbArgs for Umount {
    const NAME: &'static str = "umount";
    const ABOUT: &'static str = "Unmount an image";
    const EXAMPLES: &'static str = "quire umount /mnt";
    const ALIAS: Option<&'static str> = Some("unmount");

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        umount(context, self)
    }
}

pub(crate) fn umount(context: &Context, args: &Umount) -> anyhow::Result<Answer> {
    let how = if args.lazy { Unmount::Lazy } else { Unmount::Now };
    let own = OwnMounts::for_user(context.who());
    for directory in &args.directories {
        let path = std::fs::canonicalize(directory)
            .with_context(|| format!("cannot find \"{}\"", directory.display()))?;
        let mount = own.at(&path)?;
        let mount =
            mount.with_context(|| format!("nothing is mounted on \"{}\"", directory.display()))?;
        match mount {
            Ok(mount) => own.unmount(&mount, how)?,
            Err(other) => bail!(
                "the mount on \"{}\" belongs to \"{}\", not to Quire: use umount",
                directory.display(),
                other.source
            ),
        }
    }
    Ok(Answer::Yes)
}
