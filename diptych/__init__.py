"""Plans that both backends execute (``diptych.plans``) and their prediction (``diptych.planner``); no framework."""
