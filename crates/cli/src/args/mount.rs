//! The command lines of `mount` and `umount`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use container::root::WritableWish;

use super::{Trust, WARM, Warm};
use crate::userns::UserNs;
use crate::writable::writable;

/// What files of a mount may do, in the words of mount(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum MountWord {
    /// Set-uid files and file capabilities have effect
    Suid,
    /// They have none: the default
    NoSuid,
    /// Device nodes can be opened
    Dev,
    /// They cannot: the default
    NoDev,
    /// Programs can be executed: the default
    Exec,
    /// They cannot
    NoExec,
    /// Nothing can be written: the default, and refused together with --writable
    Ro,
}

#[derive(Debug, Args)]
pub(crate) struct Mount {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// An existing directory
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
    #[arg(
        short,
        long,
        value_enum,
        value_name = "OPTION,…",
        value_delimiter = ',',
        hide_possible_values = true,
        help = "Mount options as of mount(8), separated by commas; the last one counts: suid or nosuid, dev or nodev, exec \
                or noexec, ro. By default nosuid,nodev,exec: every user of the host can reach what is mounted, so that \
                set-uid files, file capabilities and devices of the image have no effect"
    )]
    pub(crate) options: Vec<MountWord>,
    #[command(flatten)]
    pub(crate) trust: Trust,
    #[arg(
        long,
        value_name = "KIND",
        default_value = "none",
        value_parser = writable,
        help = "Where changes go: memory[,size=SIZE], self[,size=SIZE][,durable] (a file system in one file without a \
                name, gone at unmount; its whole size is allocated at once, by default an eighth of what is free) or dir=PATH[,durable]"
    )]
    pub(crate) writable: WritableWish,
    /// Let `df` show an empty file system with some space in it, not a full one. The price is a root directory that is
    /// merged of two, which takes longer to list
    #[arg(long)]
    pub(crate) df: bool,
    /// Who the image's owners are on the host: a map, CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…], for users and groups
    /// alike. Those whom it lacks are shown as nobody (65534)
    #[arg(long, value_name = "MAP")]
    pub(crate) userns: Option<UserNs>,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
}

#[derive(Debug, Args)]
pub(crate) struct Umount {
    /// Where the image is mounted
    #[arg(required = true, value_hint = ValueHint::DirPath)]
    pub(crate) directories: Vec<PathBuf>,
    /// Detach even when it is in use; it is freed when its last user has gone
    #[arg(short, long)]
    pub(crate) lazy: bool,
}
