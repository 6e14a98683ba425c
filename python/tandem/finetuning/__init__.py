"""`tandem finetune`: from a model and records to a model that answers, in stages that a second call goes on with."""
