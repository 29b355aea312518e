//! The source images of `merge` and `filter`.

use store::{Form, OpenImage, RefName, Resolved, Store};

use crate::session::context::Context;

/// The source images. While they are open, `gc` keeps them and their objects.
pub(crate) struct Sources {
    pub(crate) found: Vec<Resolved>,
    open: Vec<OpenImage>,
}

impl Sources {
    pub(crate) fn from_names(
        context: &Context,
        store: &Store,
        names: &[String],
    ) -> anyhow::Result<Self> {
        let (mut found, mut open) = (Vec::new(), Vec::new());
        for name in names {
            let resolved = crate::session::resolve::resolve(store, name)?;
            // The new image makes the contents available under another name, so the policies must accept the source.
            let permitted = crate::session::policy::permit(context, store, resolved)?;
            found.push(permitted.found().clone());
            open.push(store.open_found(permitted.found())?);
        }
        Ok(Self { found, open })
    }

    /// Returns the form of the sources if all have the same form; otherwise a form in which all of them can be stored.
    pub(crate) fn form(&self) -> Form {
        let has = |form| self.open.iter().any(|it| it.form == form);
        match (has(Form::Tar), has(Form::Packed)) {
            (true, _) => Form::Tar,
            (false, true) => Form::Packed,
            (false, false) => Form::Objects,
        }
    }

    pub(crate) fn tell_config(&self, context: &Context, new: &RefName) {
        if self.found.iter().any(|it| it.manifest.is_some()) {
            context.remark(&format!(
                "{new} has only files, and no configuration (command, environment, user): `quire \
                run {new} -- COMMAND` chooses the command"
            ));
        }
    }
}
