//! The command lines of `mount` and `umount`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use container::root::WritableWish;

#[cfg(feature = "serve")]
use super::LazyOptions;
use super::userns::UserNs;
use super::{Trust, WARM, Warm};
use crate::writable::writable;

/// What files of a mount may do, in the words of mount(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum MountWord {
    /// Honour set-uid files and file capabilities
    Suid,
    /// Ignore set-uid files and file capabilities: the default
    NoSuid,
    /// Allow to open device nodes
    Dev,
    /// Forbid to open device nodes: the default
    NoDev,
    /// Allow to execute programs: the default
    Exec,
    /// Forbid to execute programs
    NoExec,
    /// Read-only: the default, and refused together with --writable
    Ro,
}

#[derive(Debug, Args)]
pub(crate) struct Mount {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// An existing directory
    #[arg(value_hint = ValueHint::DirPath, required_unless_present = "specification")]
    pub(crate) directory: Option<PathBuf>,
    /// Unmount another image, or the same image with other options, from the directory first
    #[arg(long)]
    pub(crate) replace: bool,
    /// Print what another program needs to mount the image by itself, as JSON, and mount nothing
    #[arg(
        long,
        conflicts_with_all = ["directory", "replace", "options", "writable", "df", "userns", "warm"]
    )]
    pub(crate) specification: bool,
    #[arg(
        short,
        long,
        value_enum,
        value_name = "OPTION,…",
        value_delimiter = ',',
        hide_possible_values = true,
        help = "Mount options as in mount(8), separated by commas; the last one wins: suid or nosuid, dev or nodev, exec \
                or noexec, ro. The default is nosuid,nodev,exec: every user of the host can reach the mount, so set-uid \
                files, file capabilities and devices of the image have no effect"
    )]
    pub(crate) options: Vec<MountWord>,
    #[command(flatten)]
    pub(crate) trust: Trust,
    #[arg(
        long,
        value_name = "KIND",
        default_value = "none",
        value_parser = writable,
        help = "Store changes in: memory[,size=SIZE]; self[,size=SIZE][,durable], a file system in one unnamed file, removed \
                at unmount, whose whole size is allocated at once (by default an eighth of the free space); or \
                dir=PATH[,durable]"
    )]
    pub(crate) writable: WritableWish,
    /// Let `df` show free space instead of a full file system. The root directory is then merged from two, and takes longer
    /// to list
    #[arg(long)]
    pub(crate) df: bool,
    /// Map the image's owners to users of the host: CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…], for users and groups alike.
    /// Owners that are not in the map appear as nobody (65534)
    #[arg(long, value_name = "MAP")]
    pub(crate) userns: Option<UserNs>,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    pub(crate) lazy: LazyOptions,
}

#[derive(Debug, Args)]
pub(crate) struct Umount {
    /// Directories where images are mounted
    #[arg(required = true, value_hint = ValueHint::DirPath)]
    pub(crate) directories: Vec<PathBuf>,
    /// Detach even a busy mount; the kernel frees it when its last user is gone
    #[arg(short, long)]
    pub(crate) lazy: bool,
}
