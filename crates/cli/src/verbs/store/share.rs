//! `share`: lets all users of the host use the images of this store.

use anyhow::bail;
use clap::Args;
use store::{OpenOptions, Sharing};

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Share {
    /// Make the store accessible only to its owner again
    #[arg(long)]
    pub(crate) undo: bool,
}

impl VerbArgs for Share {
    const NAME: &'static str = "share";
    const ABOUT: &'static str = "Let all users of this host use the images of the store";
    const DETAILS: &'static str = "They can then read every file of every image, regardless of \
        its mode in the image. They cannot change the store, and containers, pulls and credentials \
        stay the owner's. Users mount and run images of root's store as if they were in their own \
        store.";
    const EXAMPLES: &'static str = "quire share\n  quire share --undo";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        share(context, self)
    }
}

pub(crate) fn share(context: &Context, args: &Share) -> anyhow::Result<Answer> {
    if !args.undo && !context.outside().is_host_root() {
        bail!(
            "only root can share a store, because a store that another user can change is unsafe. \
            `sudo quire pull` and `sudo quire share` provide an image to all users"
        );
    }
    let store = context.open(OpenOptions::write())?;
    let wanted = if args.undo { Sharing::Owner } else { Sharing::All };
    let was = store.sharing()?;
    store.share(wanted)?;
    let path = store.path().display();
    context.remark(&match (wanted, was) {
        (Sharing::All, Sharing::All) => format!("{path} is already shared"),
        (Sharing::All, Sharing::Owner) => format!(
            "all users of this host can now read all files of all images in {path}, also those that only root may read in \
             an image; `quire share --undo` ends that"
        ),
        (Sharing::Owner, Sharing::All) => {
            format!("{path} is no longer shared; containers and mounts of other users keep their \
                open files")
        }
        (Sharing::Owner, Sharing::Owner) => format!("{path} is not shared"),
    });
    Ok(Answer::Yes)
}
