//! `convert`: an image of the store gets another form.

use anyhow::Context as _;
use store::{OpenOptions, RefName};
use transfer::import::Stored;

use crate::Answer;
use crate::args::{self, TreeOptions};
use crate::context::Context;
use crate::forms::choose;
use crate::import::{self, Wishes};

pub(crate) fn convert(context: &Context, args: &args::Convert) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = crate::resolve::resolve(&store, &args.name)?;
    let permitted = crate::policy::permit(context, &store, found)?;
    let found = permitted.found();
    let new: Option<RefName> = args.new.as_deref().map(str::parse).transpose()?;
    let name = new.as_ref().or(found.name.as_ref());
    let wishes = Wishes {
        name,
        tree: &TreeOptions::default(),
        form: choose(&args.form, &store)?,
        platform: None,
        budget: usize::try_from(args.memory << 20).context("--memory is too much")?,
    };
    // From here on `gc` leaves the image alone.
    let _open = store.open_image(&found.image)?;
    let image = Stored {
        image: &found.image,
        manifest: found.manifest.as_ref(),
        name: found.name.as_ref(),
    };
    let done = import::with_options(context, &store, &wishes, |options| {
        transfer::import::convert(&store, &image, options)
    })??;
    import::tell(context, &done)?;
    Ok(Answer::Yes)
}
