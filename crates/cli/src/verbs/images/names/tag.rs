//! `tag`: gives an image another name.

use clap::Args;
use store::{Form, OpenOptions, RefName};

use crate::Answer;
use crate::session::context::{Context, now};
use crate::session::resolve::resolve;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Tag {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// The new name
    pub(crate) new: String,
}

impl VerbArgs for Tag {
    const NAME: &'static str = "tag";
    const ABOUT: &'static str = "Give an image another name";
    const EXAMPLES: &'static str = "quire tag app app:stable";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        tag(context, self)
    }
}

pub(crate) fn tag(context: &Context, args: &Tag) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = resolve(&store, &args.name)?;
    let new: RefName = args.new.parse()?;
    let form = match &found.name {
        Some(name) => store.refs.get(name)?.map(|it| it.form),
        // An image that lacks data can also get a name.
        None => store.open_image(&found.image).ok().map(|it| it.form),
    };
    let reference = store::Reference {
        image: found.image,
        manifest: found.manifest,
        form: form.unwrap_or(Form::Objects),
        created: now(),
    };
    store.set_ref(&new, &reference)?;
    // An image that had no name has one now.
    let unnamed = RefName::unnamed(&found.image, found.manifest.as_ref());
    if let Ok(Some(reference)) = store.refs.get(&unnamed) {
        store.remove_ref_if(&unnamed, &reference)?;
    }
    Ok(Answer::Yes)
}
