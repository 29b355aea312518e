//! `convert`: stores an image in another form.

use store::{OpenOptions, RefName};
use transfer::import::{ImportWishes, Stored};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::forms::{Choice, choose};
use crate::import::tell;
use crate::surroundings::{Surroundings, budget};

pub(crate) fn convert(context: &Context, args: &args::Convert) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = crate::resolve::resolve(&store, &args.name)?;
    let permitted = crate::policy::permit(context, &store, found)?;
    let found = permitted.found();
    let new: Option<RefName> = args.new.as_deref().map(str::parse).transpose()?;
    let name = new.as_ref().or(found.name.as_ref());
    let Choice { form, dedup } = choose(&args.form, &store)?;
    let wishes = ImportWishes { name, form, dedup, ..ImportWishes::default() };
    // From here on `gc` leaves the image alone.
    let _open = store.open_found(found)?;
    let image = Stored {
        image: &found.image,
        manifest: found.manifest.as_ref(),
        name: found.name.as_ref(),
    };
    let done =
        Surroundings::new(context, &store, budget(args.memory)?).during(|surroundings| {
            transfer::import::convert(&store, &image, surroundings, &wishes)
        })??;
    tell(context, &done)?;
    Ok(Answer::Yes)
}
