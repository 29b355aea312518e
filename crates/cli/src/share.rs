//! `share`: all users of the host may use the images of this store.

use anyhow::bail;
use store::{OpenOptions, Sharing};

use crate::Answer;
use crate::args;
use crate::context::Context;

pub(crate) fn share(context: &Context, args: &args::Share) -> anyhow::Result<Answer> {
    if !args.undo && !context.outside().is_host_root() {
        bail!(
            "only root shares a store: others do not use what another user can change. `sudo quire pull` and `sudo quire \
             share` bring an image to all users"
        );
    }
    let store = context.open(OpenOptions::write())?;
    let wanted = if args.undo { Sharing::Owner } else { Sharing::All };
    let was = store.sharing()?;
    store.share(wanted)?;
    let path = store.path().display();
    context.remark(&match (wanted, was) {
        (Sharing::All, Sharing::All) => format!("{path} is shared already"),
        (Sharing::All, Sharing::Owner) => format!(
            "all users of this host can now read all files of all images in {path}, also those that only root may read in \
             an image; `quire share --undo` ends that"
        ),
        (Sharing::Owner, Sharing::All) => {
            format!("{path} is no longer shared; containers and mounts of others keep what they have open")
        }
        (Sharing::Owner, Sharing::Owner) => format!("{path} is not shared"),
    });
    Ok(Answer::Yes)
}
