//! `untag`: removes names of an image, and keeps the image.

use anyhow::bail;
use clap::Args;
use store::{OpenOptions, RefName, Reference, Store};

use crate::Answer;
use crate::session::context::Context;
use crate::session::resolve::resolve;
use crate::verbs::VerbArgs;
use crate::verbs::images::names::rmi::image_name;

#[derive(Debug, Args)]
pub(crate) struct Untag {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) image: String,
    /// Names of the image to remove; by default all of them
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

impl VerbArgs for Untag {
    const NAME: &'static str = "untag";
    const ABOUT: &'static str = "Remove names of an image, and keep the image";
    const DETAILS: &'static str = "Without its last name, the image stays with its id and the digest of its manifest: `quire images` \
        lists it as <none>, `quire tag` names it again, and `quire image prune` removes it if no container uses it. `quire rmi` removes a \
        name without keeping the image.";
    const EXAMPLES: &'static str = "quire untag app app:old";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        untag(context, self)
    }
}

fn untag(context: &Context, args: &Untag) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = resolve(&store, &args.image)?;
    let (refs, _) = store.refs.readable()?;
    let is_of_image = |it: &Reference| it.image == found.image && it.manifest == found.manifest;
    let of_image: Vec<_> =
        refs.into_iter().filter(|(name, it)| is_of_image(it) && !name.is_unnamed()).collect();
    let doomed = match &*args.names {
        [] => of_image.clone(),
        texts => {
            texts.iter().map(|it| named(&store, &of_image, it)).collect::<anyhow::Result<_>>()?
        }
    };
    if let [(_, reference), ..] = &*doomed
        && of_image.iter().all(|it| doomed.contains(it))
    {
        // Before the last name is removed, so that `gc` does not remove the image in between.
        let unnamed = RefName::unnamed(&found.image, found.manifest.as_ref());
        store.set_ref(&unnamed, reference)?;
    }
    for (name, reference) in &doomed {
        if !store.remove_ref_if(name, reference)? {
            context
                .remark(&format!("{name} stays: another command has changed it at the same time"));
        }
    }
    Ok(Answer::Yes)
}

/// Returns the name of an image that `text` stands for.
fn named(
    store: &Store,
    of_image: &[(RefName, Reference)],
    text: &str,
) -> anyhow::Result<(RefName, Reference)> {
    let name = image_name(store, text, false)?;
    match of_image.iter().find(|it| Some(&it.0) == name.as_ref()) {
        Some(found) => Ok(found.clone()),
        None => bail!("\"{}\" is not a name of this image", text.escape_debug()),
    }
}
