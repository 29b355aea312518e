//! `bundle`: an OCI bundle for other tools.

use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use container::bundle::{Process, Terminal, host_files, runtime_config};
use container::monitor::ROOT;
use container::root::Shape;
use container::stage::Stage;
use kernel::mount::Freed;
use store::OpenOptions;

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::volumes::{Files, volumes};
use crate::wanted::{image_config, wish, wishes};
use crate::writable::Place;

pub(crate) fn bundle(context: &Context, args: &args::Bundle) -> anyhow::Result<Answer> {
    // First, since this is the easiest to mend.
    check_empty(&args.directory)?;
    let store = context.open(OpenOptions::read())?;
    let found = crate::names::resolve(&store, &args.image)?;
    crate::policy::check(context, &store, &found)?;
    let opened = store.open_image(&found.image)?;
    let image = image_config(&store, &found)?;
    let wanted = &args.wanted;
    let map = wanted.ids.fixed()?;
    if let Some(map) = &map {
        map.root()?;
    }
    let place = Place::make(context, &store, wish(wanted))?;
    let space = crate::mount::space(wanted.df, place.access())?;
    let shape = Shape { writable: place.writable(Freed::AtOnce), map: map.as_ref(), space };
    let root =
        crate::mount::root(context, &opened, &found, &wanted.trust, &shape, std::iter::empty())?;
    crate::mount::warm(context, &opened, &root, wanted.warm);
    let user = wanted.program.user.as_deref().unwrap_or(&image.user);
    let user = container::user::find(root.mount.as_fd(), user)?;
    let terminal = if args.tty { Terminal::New } else { Terminal::None };
    if let Some(map) = &map {
        map.check(&user)?;
    }
    let mut wishes = wishes(wanted, &args.command, terminal, "quire", place.access())?;
    let mut stage = Stage::new(&args.directory, None);
    wishes.volumes = volumes(wanted, &Files::default(), map.as_ref(), &mut stage)?;
    let has_map = map.is_some();
    wishes.map = map;
    wishes.host_files = host_files(root.mount.as_fd(), wishes.access);
    let process = Process::new(&image, &wishes, &user)?;
    let config = runtime_config(&process, &user, &wishes, &image, ROOT);
    let directory = &args.directory;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make \"{}\"", directory.display()))?;
    let rootfs = directory.join(ROOT);
    let file = directory.join("config.json");
    let made = std::fs::create_dir(&rootfs)
        .with_context(|| format!("cannot make \"{}\"", rootfs.display()))
        .and_then(|()| {
            let text = serde_json::to_string_pretty(&config)?;
            std::fs::write(&file, text + "\n")
                .with_context(|| format!("cannot write \"{}\"", file.display()))
        })
        // Last: from here on there is something to unmount.
        .and_then(|()| Ok(root.mount.attach_at(&rootfs)?));
    if made.is_err() {
        // As it was: both are ours.
        drop((std::fs::remove_file(&file), std::fs::remove_dir(&rootfs)));
    }
    made?;
    if has_map && let Some(closed) = closed_above(directory) {
        context.remark(&format!(
            "the container's root, who is nobody to the host, cannot pass through {}: `chmod o+x` lets him, or choose \
             another directory",
            closed.display()
        ));
    }
    let (directory, rootfs) = (directory.display(), rootfs.display());
    context.remark(&format!(
        "`crun run --bundle {directory} NAME` runs it; `quire umount {rootfs}` ends it"
    ));
    Ok(Answer::Yes)
}

/// The first directory on the way that not everybody may pass through.
fn closed_above(directory: &Path) -> Option<PathBuf> {
    let path = std::fs::canonicalize(directory).ok()?;
    let mut above: Vec<_> = path.ancestors().collect();
    above.reverse();
    let is_open =
        |path: &Path| std::fs::metadata(path).is_ok_and(|it| it.permissions().mode() & 0o001 != 0);
    above.into_iter().find(|path| !is_open(path)).map(Path::to_owned)
}

fn check_empty(directory: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot read \"{}\"", directory.display());
    let is_empty = match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(failed),
    };
    if !is_empty {
        let directory = directory.display();
        bail!("\"{directory}\" is not empty: name a directory that is, or is not there yet");
    }
    Ok(())
}
