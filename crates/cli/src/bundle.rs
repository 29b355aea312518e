//! `bundle`: an OCI bundle for other tools.

use std::os::fd::AsFd as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use container::bundle::{Process, Terminal, host_files, runtime_config};
use container::monitor::ROOT;
use kernel::mount::Freed;
use store::OpenOptions;

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::run::{image_config, wish, wishes};
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
    let place = Place::make(context, &store, wish(wanted))?;
    let root = crate::mount::root(
        context,
        &opened,
        &found,
        &wanted.trust,
        place.writable(Freed::AtOnce),
        None,
    )?;
    let user = wanted.user.as_deref().unwrap_or(&image.user);
    let user = container::user::find(root.mount.as_fd(), user)?;
    let terminal = if args.tty { Terminal::New } else { Terminal::None };
    let mut wishes = wishes(wanted, &args.command, terminal, "quire", place.access())?;
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
    let (directory, rootfs) = (directory.display(), rootfs.display());
    context.remark(&format!(
        "`crun run --bundle {directory} NAME` runs it; `quire umount {rootfs}` ends it"
    ));
    Ok(Answer::Yes)
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
